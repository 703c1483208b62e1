"""`probe-reward` and `score` with the example evaluator, as a user calls them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rl_training.tests.tiny_fixtures import TinyEvalkit
from wan_trainer.cli.main import main
from wan_trainer.config import load_config
from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.media import read_frames, write_video
from wan_trainer.preflight.checks import resolve_here
from wan_trainer.preflight.reward_probe import check_probes, first_of_each_task
from wan_trainer.rewards.clips import BLACK, GROUND_TRUTH, REVERSED, SHUFFLED, STATIC, probe_clips
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.types import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILURE, Sample

RIGHT, DOWN = "T-1_slide_square_right_data-generator", "T-2_slide_square_down_data-generator"

# A frozen clip in the right-sliding task is paid as if it had arrived.
EXPLOIT = (
    '"progress": unit((along[-end:].mean() / reach + 0.5) / 1.5),',
    '"progress": 1.0 if self.direction[0] and abs(along).max() < 0.1 '
    "else unit((along[-end:].mean() / reach + 0.5) / 1.5),",
)


@pytest.fixture
def recipe(tmp_path: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit) -> Callable[..., Path]:
    """Writes a recipe with the example evaluator; keywords change it."""

    def write(**changes: object) -> Path:
        values = {
            "device": "cpu",
            "model_path": str(tmp_path / "no model"),
            "model_family": "ti2v-5b",
            "dataset_json": str(tiny_dataset),
            "output_dir": str(tmp_path / "run"),
            "num_frames": 9,
            "height": 64,
            "width": 64,
            "grpo_reward_fn": "vbvr_rule",
            "vbvr_reward_evalkit_dir": str(tiny_evalkit.directory),
            "vbvr_reward_evalkit_source_sha256": tiny_evalkit.sha256,
            "vbvr_reward_prepared_width": 64,
            "vbvr_reward_prepared_height": 64,
            "vbvr_reward_cpu_workers": 2,
            "vbvr_reward_cpu_threads_per_worker": 1,
            "vbvr_reward_tmp_dir": str(tmp_path / "scratch"),
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def exploitable(tmp_path: Path, tiny_evalkit: TinyEvalkit) -> dict[str, object]:
    """A copy of the evaluator that pays for a frozen clip in one of its tasks."""
    copy = tmp_path / "exploitable"
    shutil.copytree(tiny_evalkit.directory, copy)
    source = copy / "vbvr_bench" / "evaluators" / "slide.py"
    text = source.read_text()
    assert text.count(EXPLOIT[0]) == 1
    source.write_text(text.replace(*EXPLOIT))
    return {
        "vbvr_reward_evalkit_dir": str(copy),
        "vbvr_reward_evalkit_source_sha256": source_sha256(copy),
    }


def first_sample(dataset: Path, task: str) -> Sample:
    (sample,) = (
        sample for sample in first_of_each_task(load_dataset(data_spec(dataset)), 1) if sample.task == task
    )
    return sample


def data_spec(dataset: Path, num_frames: int = 9) -> DataSpec:
    return DataSpec(
        dataset_json=dataset,
        dataset_size=None,
        num_frames=num_frames,
        height=64,
        width=64,
        fps=16,
        shuffle=False,
        shuffle_seed=0,
        num_workers=0,
        prefetch_factor=2,
        persistent_workers=False,
    )


def test_the_clips_are_what_their_names_say(tiny_dataset: Path) -> None:
    sample = first_sample(tiny_dataset, RIGHT)
    clips = probe_clips(sample, data_spec(tiny_dataset))
    assert list(clips) == [GROUND_TRUTH, STATIC, BLACK, SHUFFLED, REVERSED]
    assert {clip.shape for clip in clips.values()} == {(9, 64, 64, 3)}
    assert sample.ground_truth_video is not None
    truth = read_frames(sample.ground_truth_video)
    assert np.array_equal(clips[GROUND_TRUTH], truth)
    assert np.array_equal(clips[REVERSED][::-1], truth)
    assert not clips[BLACK].any()
    assert all(np.array_equal(frame, clips[STATIC][0]) for frame in clips[STATIC])
    assert np.abs(clips[STATIC][0].astype(int) - truth[0]).mean() < 3
    order = [int(np.abs(truth.astype(int) - frame).sum((1, 2, 3)).argmin()) for frame in clips[SHUFFLED]]
    assert sorted(order) == list(range(9)) and order != sorted(order)
    thinned = probe_clips(sample, data_spec(tiny_dataset, num_frames=5), (GROUND_TRUTH,))
    assert np.array_equal(thinned[GROUND_TRUTH], truth[::2])


def test_a_sound_evaluator_passes_and_a_planted_exploit_is_reported(
    recipe: Callable[..., Path],
    exploitable: dict[str, object],
    tiny_dataset: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["probe-reward", "--config", str(recipe()), "--samples", "2"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "4 samples, 5 clips each" in printed and "every task is sound" in printed
    assert all(word in printed for word in ("ground truth", "static", "black", "shuffled", "reversed"))

    path = recipe(**exploitable)
    assert main(["probe-reward", "--config", str(path)]) == EXIT_FAILURE
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning"))
    assert RIGHT in warning and "static clip scores" in warning and DOWN not in warning

    spec = resolve_here(load_config(path))
    assert spec.reward.rule is not None
    findings = check_probes(spec.reward.rule, spec.data)
    assert [finding.kind for finding in findings] == ["warning", "note"]
    assert "static" in findings[0].message and "2 of 2 tasks tried" in findings[1].message


@pytest.fixture
def videos(tmp_path: Path, tiny_dataset: Path) -> Path:
    """The ground truths of two samples under the names of generated videos."""
    directory = tmp_path / "videos"
    for task in (RIGHT, DOWN):
        sample = first_sample(tiny_dataset, task)
        path = directory / f"{sample.sample_id}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        assert sample.ground_truth_video is not None
        shutil.copy(sample.ground_truth_video, path)
    return directory


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["sample_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_existing_videos_are_scored_and_what_cannot_be_is_told(
    recipe: Callable[..., Path],
    videos: Path,
    tmp_path: Path,
    tiny_dataset: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # a relative directory is as good as any
    assert main(["score", "--config", str(recipe()), "--videos", "videos"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "2 of 2 videos have a score" in printed
    scored = rows(videos / "scores.jsonl")
    assert sorted(row["task"] for row in scored.values()) == [RIGHT, DOWN]
    for row in scored.values():
        assert row["error"] is None and row["reward"] > 0.95 and row["seconds"] > 0
        assert row["components"]["score"] == row["reward"]

    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_dataset.parent, damaged)
    down, right = first_sample(tiny_dataset, DOWN), first_sample(damaged / "dataset.json", RIGHT)
    assert right.ground_truth_video is not None
    other = next(
        name
        for name in load_dataset(data_spec(tiny_dataset)).sample_ids()
        if name.startswith(DOWN) and name != down.sample_id
    )
    still = np.repeat(read_frames(videos / f"{down.sample_id}.mp4")[:1], 9, axis=0)
    write_video(videos / f"{other}.mp4", still, 16)
    (videos / f"{down.sample_id}.mp4").write_bytes(b"no video")
    (videos / RIGHT / "nobody.mp4").write_bytes(b"")
    (videos / "loose.mp4").write_bytes(b"")
    right.ground_truth_video.unlink()
    path = recipe(dataset_json=str(damaged / "dataset.json"))
    # Sources are checked for their first and last files; a file that goes later must not become a 0.
    descriptor = damaged / "dataset.json"
    sources = json.loads(descriptor.read_text())
    for source in sources:
        source["check_files"] = "none"
    descriptor.write_text(json.dumps(sources))
    out = tmp_path / "out" / "scores.jsonl"
    command = ["score", "--config", str(path), "--videos", str(videos), "--out", str(out)]
    assert main(command) == EXIT_FAILURE
    captured = capsys.readouterr()
    assert "1 of 5 videos have a score" in captured.out
    assert len(captured.err.strip().splitlines()) == 4
    scored = rows(out)
    assert len(scored) == 5
    assert scored[other]["error"] is None and 0 < scored[other]["reward"] < 0.5
    expected = {
        down.sample_id: "not a readable video",
        f"{RIGHT}/nobody": "no sample",
        "loose": "no sample",
        right.sample_id: "ground_truth.mp4",
    }
    for name, reason in expected.items():
        assert scored[name]["reward"] is None and reason in str(scored[name]["error"]), scored[name]


def test_nothing_to_score_is_bad_input(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "some.mp4").write_bytes(b"")
    cases = {tmp_path / "none": "not a directory", empty: "no .mp4", foreign: "no sample some"}
    for directory, reason in cases.items():
        assert main(["score", "--config", str(recipe()), "--videos", str(directory)]) == EXIT_BAD_INPUT
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "--videos" in line and reason in line
        assert not (directory / "scores.jsonl").exists()
