"""`wan-trainer score`: scores existing video files with the rewards of a recipe, as a run would."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from wan_trainer.config.family import known_family
from wan_trainer.config.load import load_with_sources
from wan_trainer.config.specs import RewardSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.preflight.checks import resolve_here
from wan_trainer.rewards.build import build_reward
from wan_trainer.rewards.files import FileScore, VideoFile, score_files
from wan_trainer.targets import make_importable
from wan_trainer.types import EXIT_DONE, EXIT_FAILURE, UserError, first_line

WINDOW = 32
"""Most videos that are decoded and wait for a score: 2 GB for 81 frames of 512 x 512."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; unknown ones are configuration overrides."""
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe (YAML)")
    parser.add_argument(
        "--videos", required=True, type=Path, metavar="DIR", help="holds <task>/<sample id>.mp4"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="scores, one JSON line a video (default DIR/scores.jsonl)"
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """0 when every video has a score, 1 when some have none, 2 when nothing could be scored at all."""
    loaded = load_with_sources(args.config, rest)
    make_importable(loaded.path.parent)
    # No model is needed here: shapes are checked by the rules that all families share.
    spec = resolve_here(loaded.config, known_family(loaded.config) or "t2v-1.3b")
    directory = args.videos.resolve()
    files = video_files(directory, load_dataset(spec.data))
    out = (args.out or directory / "scores.jsonl").resolve()
    tasks = tuple(dict.fromkeys(file.sample.task for file in files if file.sample is not None))
    reward = build_reward(spec.reward, tasks)
    scores: list[FileScore] = []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", encoding="utf-8") as stream:
            for score in score_files(reward, files, _window(spec.reward)):
                stream.write(json.dumps(row(score, directory), allow_nan=False) + "\n")
                stream.flush()
                if score.result.error is not None:
                    print(f"{score.file.path}: no score: {score.result.error}", file=sys.stderr, flush=True)
                scores.append(score)
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}; name a file that can be written") from error
    finally:
        reward.close()
    Console().print(table(scores))
    missing = sum(not score.result.valid for score in scores)
    print(f"score     {len(scores) - missing} of {len(scores)} videos have a score: {out}")
    return EXIT_FAILURE if missing else EXIT_DONE


def video_files(directory: Path, dataset: Dataset) -> list[VideoFile]:
    """Every <task>/<sample id>.mp4 under `directory` with its sample. Raises UserError where none has one."""
    if not directory.is_dir():
        raise UserError(
            f"--videos: {directory} is not a directory; give one that holds <task>/<sample id>.mp4"
        )
    paths = sorted(directory.rglob("*.mp4"))
    if not paths:
        raise UserError(f"--videos: {directory} holds no .mp4; it must hold <task>/<sample id>.mp4")
    places = {name: index for index, name in enumerate(dataset.sample_ids())}
    files = [_video_file(path, directory, dataset, places) for path in paths]
    if all(file.sample is None for file in files):
        raise UserError(
            f"--videos: none of the {len(files)} videos in {directory} can be scored "
            f"(first: {files[0].path.relative_to(directory)}: {files[0].problem}); "
            "they must be named <task>/<sample id>.mp4"
        )
    return files


def row(score: FileScore, directory: Path) -> dict[str, object]:
    """The JSON line of one video; its reward is null when it has none."""
    result = score.result
    return {
        "task": score.file.task,
        "sample_id": score.file.sample_id,
        "video": str(score.file.path.relative_to(directory)),
        "reward": result.reward if result.valid else None,
        "components": dict(result.components),
        "seconds": result.ended - result.started,
        "error": result.error,
    }


def table(scores: Sequence[FileScore]) -> Table:
    """Number, mean, least and greatest reward of each task."""
    shown = Table(Column("task", overflow="fold"), "videos", "scored", "mean", "least", "greatest")
    groups: dict[str, list[FileScore]] = {}
    for score in scores:
        groups.setdefault(score.file.task, []).append(score)
    for task, group in groups.items():
        rewards = [score.result.reward for score in group if score.result.valid]
        values = (sum(rewards) / len(rewards), min(rewards), max(rewards)) if rewards else ()
        cells = [f"{value:.3f}" for value in values] or ["-"] * 3
        shown.add_row(task, str(len(group)), str(len(rewards)), *cells)
    return shown


def _video_file(path: Path, directory: Path, dataset: Dataset, places: dict[str, int]) -> VideoFile:
    name = path.relative_to(directory).with_suffix("").as_posix()
    task = name.rpartition("/")[0]
    place = places.get(name)
    if place is None:
        near = difflib.get_close_matches(name, places, 1)
        advice = f"; the nearest is {near[0]}" if near else ""
        return VideoFile(path, task, name, None, f"the dataset has no sample {name}{advice}")
    try:
        sample = dataset[place]
    except UserError as error:
        return VideoFile(path, task, name, None, first_line(error))
    return VideoFile(path, sample.task, name, sample)


def _window(spec: RewardSpec) -> int:
    limits = [part.max_pending_jobs for part in (spec.rule, spec.judge) if part is not None]
    return min([WINDOW, *limits])
