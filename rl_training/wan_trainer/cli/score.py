"""`wan-trainer score`: scores existing video files with the rewards of a recipe, as a run would."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from wan_trainer.config.family import known_family
from wan_trainer.config.load import load_with_sources
from wan_trainer.config.specs import RewardSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.media import kept_frames
from wan_trainer.preflight.checks import resolve_here
from wan_trainer.recording.jsonl import encode
from wan_trainer.rewards.build import build_reward
from wan_trainer.rewards.files import FileScore, VideoFile, score_files
from wan_trainer.rewards.messages import one_line
from wan_trainer.targets import make_importable
from wan_trainer.types import EXIT_DONE, EXIT_FAILURE, UserError, first_line

WINDOW = 32
"""Most videos that are decoded and wait for a score."""

ADVISED = 20
"""Videos without a sample for which the nearest is looked up: among 50,000 names it takes seconds."""


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
        with out.open("wb") as stream:
            for score in score_files(reward, files, _window(spec.reward)):
                stream.write(encode(row(score, directory)) + b"\n")
                stream.flush()
                if score.result.error is not None:
                    print(
                        _shown(f"{score.file.path}: no score: {score.result.error}"),
                        file=sys.stderr,
                        flush=True,
                    )
                scores.append(score)
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}; name a file that can be written") from error
    finally:
        reward.close()
    Console().print(table(scores))
    for line in cut_short(scores, spec.reward):
        print(f"warning   {line}")
    missing = sum(not score.result.valid for score in scores)
    print(f"score     {len(scores) - missing} of {len(scores)} videos have a score: {out}")
    return EXIT_FAILURE if missing else EXIT_DONE


def video_files(directory: Path, dataset: Dataset) -> list[VideoFile]:
    """Every <task>/<sample id>.mp4 under `directory` with its sample. Raises UserError where none has one."""
    if not directory.is_dir():
        raise UserError(
            f"--videos: {directory} is not a directory; give one that holds <task>/<sample id>.mp4"
        )
    # The first pattern follows no links; task directories often are.
    paths = sorted({*directory.rglob("*.mp4"), *directory.glob("*/*.mp4")})
    if not paths:
        raise UserError(f"--videos: {directory} holds no .mp4; it must hold <task>/<sample id>.mp4")
    places = {name: index for index, name in enumerate(dataset.sample_ids())}
    files: list[VideoFile] = []
    advised = ADVISED
    for path in paths:
        files.append(_video_file(path, directory, dataset, places, advise=advised > 0))
        advised -= files[-1].sample is None
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
        # Text, not markup: a directory may be called anything.
        shown.add_row(Text(_shown(task)), str(len(group)), str(len(rewards)), *cells)
    return shown


def cut_short(scores: Sequence[FileScore], spec: RewardSpec) -> list[str]:
    """A line about videos that are longer than the evaluator sees."""
    rule = spec.rule
    if rule is None:
        return []
    longest = max((score.frames for score in scores), default=0)
    kept = kept_frames(longest, rule.fps, rule.max_duration_s)
    long = sum(score.frames > kept for score in scores) if longest > kept else 0
    return (
        []
        if not long
        else [
            f"{long} videos are longer than the {kept} frames that vbvr_reward_max_duration_seconds "
            f"{rule.max_duration_s:g} keeps at {rule.fps} fps: their end was not scored; raise it to "
            f"{longest / rule.fps:g} to score all {longest} frames of the longest"
        ]
    )


def _video_file(
    path: Path, directory: Path, dataset: Dataset, places: dict[str, int], *, advise: bool
) -> VideoFile:
    name = path.relative_to(directory).with_suffix("").as_posix()
    task = name.rpartition("/")[0]
    place = places.get(name)
    if place is None:
        near = difflib.get_close_matches(name, places, 1) if advise else []
        advice = f"; the nearest is {near[0]}" if near else ""
        return VideoFile(path, task, name, None, f"the dataset has no sample {name}{advice}")
    try:
        sample = dataset[place]
    except UserError as error:
        return VideoFile(path, task, name, None, first_line(error))
    return VideoFile(path, sample.task, name, sample)


def _shown(text: str) -> str:
    """One line that any terminal takes: file names hold line ends, and bytes that are no text."""
    return one_line(text, limit=2000).encode("utf-8", "backslashreplace").decode("utf-8")


def _window(spec: RewardSpec) -> int:
    limits = [part.max_pending_jobs for part in (spec.rule, spec.judge) if part is not None]
    return min([WINDOW, *limits])
