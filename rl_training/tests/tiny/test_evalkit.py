import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from rl_training.tests.tiny_fixtures import TinyEvalkit
from wan_trainer.media.video import read_frames, write_video
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.tiny.tasks import TASKS, TRAVEL, Scene, draw

PUBLIC_NAMES = [
    "NumpyEncoder",
    "aggregate_score",
    "collect_videos",
    "finalize_summary",
    "find_gt_info",
    "init_results",
    "print_results",
    "evaluate_single_video",
    "TASK_EVALUATOR_MAP",
]
# The evaluator is foreign code: scored in a process of its own, with its directory as working directory.
SCORE_LINES = """
import json, sys, time
import run_evaluation
assert all(hasattr(run_evaluation, name) for name in json.loads(sys.argv[1]))
for line in sys.stdin:
    task, clip, sample = json.loads(line)
    info = run_evaluation.find_gt_info(*sample)
    started = time.perf_counter()
    verdict = run_evaluation.evaluate_single_video(clip, task, info, "cpu")
    verdict["seconds"] = time.perf_counter() - started
    print(json.dumps(verdict, cls=run_evaluation.NumpyEncoder), flush=True)
"""
Score = Callable[[str, Path | str], dict[str, object]]


@pytest.fixture(scope="module")
def score(tiny_evalkit: TinyEvalkit, tiny_dataset: Path):
    raw = tiny_dataset.parent / "raw"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    scorer = subprocess.Popen(
        [sys.executable, "-c", SCORE_LINES, json.dumps(PUBLIC_NAMES)],
        cwd=tiny_evalkit.directory,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def one(task: str, clip: Path | str) -> dict[str, object]:
        sample = (str(raw), task, sorted(path.name for path in (raw / task).iterdir())[0])
        assert scorer.stdin is not None and scorer.stdout is not None
        scorer.stdin.write(json.dumps([task, str(clip), sample]) + "\n")
        scorer.stdin.flush()
        return json.loads(scorer.stdout.readline())

    yield one
    scorer.stdin.close()
    assert scorer.wait(timeout=20) == 0


def truth_of(dataset: Path, task: str) -> Path:
    return sorted((dataset.parent / "raw" / task).glob("*/video/ground_truth.mp4"))[0]


def probes(truth: np.ndarray) -> dict[str, np.ndarray]:
    clips = {
        "static": np.repeat(truth[:1], len(truth), axis=0),
        "black": np.zeros_like(truth),
        "reversed": truth[::-1],
        "noise": np.random.default_rng(0).integers(0, 256, truth.shape, dtype=np.uint8),
        "last frame only": np.repeat(truth[-1:], len(truth), axis=0),
    }
    for seed in range(8):
        clips[f"shuffled {seed}"] = truth[np.random.default_rng(seed).permutation(len(truth))]
    return clips


@pytest.mark.parametrize("task", [task.name for task in TASKS])
def test_ground_truth_wins_and_probes_score_below_half(
    task: str, score: Score, tiny_dataset: Path, tmp_path: Path
) -> None:
    video = truth_of(tiny_dataset, task)
    best = score(task, video)
    assert "error" not in best
    assert best["details"]["video_frame_count"] == 9
    assert best["score"] > 0.95
    for name, clip in probes(read_frames(video)).items():
        path = tmp_path / "probe.mp4"
        write_video(path, clip, 16, crf=12)
        verdict = score(task, path)
        assert "error" not in verdict
        assert 0 <= verdict["score"] < 0.5 * best["score"] - 0.1, (name, verdict)


@pytest.mark.parametrize("task", TASKS, ids=[task.generator for task in TASKS])
@pytest.mark.parametrize("size", [64, 128])
def test_score_rises_smoothly_with_the_way_the_square_goes(
    task, size: int, score: Score, tiny_dataset: Path, tmp_path: Path
) -> None:
    metadata = json.loads((truth_of(tiny_dataset, task.name).parents[1] / "metadata.json").read_text())
    words = (truth_of(tiny_dataset, task.name).parent / "prompt.txt").read_text().split()
    drawn = Scene(words[1], words[6], tuple(metadata["parameters"]["start_center"]))
    scores = []
    for share in np.arange(-0.6, 1.01, 0.1):
        clip = draw(task, drawn, TRAVEL * share)
        path = tmp_path / "clip.mp4"
        enlarged = np.stack([cv2.resize(frame, (size, size)) for frame in clip])
        write_video(path, enlarged, 16, crf=12)
        scores.append(score(task.name, path)["score"])
    rises = np.diff(scores)
    assert rises.min() >= 0
    assert rises.max() < 0.12  # no cliff: a tenth of the way never decides more than that
    assert rises[2:].min() > 0.03  # and never leaves a learner without a slope
    assert scores[0] < 0.05
    assert scores[-1] > 0.9


def test_one_score_costs_less_than_30_ms(score: Score, tiny_dataset: Path) -> None:
    video = truth_of(tiny_dataset, TASKS[0].name)
    started = time.perf_counter()
    seconds = [score(TASKS[0].name, video)["seconds"] for _ in range(20)]
    assert time.perf_counter() - started < 10
    assert min(seconds) < 0.03


def test_clips_that_cannot_be_read_score_zero_frames(score: Score, tmp_path: Path) -> None:
    missing = score(TASKS[0].name, tmp_path / "absent.mp4")
    assert missing["score"] == 0.0
    assert missing["details"]["video_frame_count"] == 0
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"not a video")
    assert score(TASKS[0].name, broken)["details"]["video_frame_count"] == 0


def test_command_line_scores_a_directory(
    tiny_evalkit: TinyEvalkit, tiny_dataset: Path, tmp_path: Path
) -> None:
    task = TASKS[1].name
    video = truth_of(tiny_dataset, task)
    clip = tmp_path / "videos" / task / f"{video.parents[1].name}.mp4"
    clip.parent.mkdir(parents=True)
    clip.write_bytes(video.read_bytes())
    out = tmp_path / "results.json"
    command = [sys.executable, "run_evaluation.py", "--videos", str(tmp_path / "videos")]
    command += ["--gt", str(tiny_dataset.parent / "raw"), "--out", str(out)]
    done = subprocess.run(command, cwd=tiny_evalkit.directory, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["summary"]["tasks"][task] > 0.95
    assert results["summary"]["errors"] == 0
    assert task in done.stdout


def test_checkout_has_the_contract_files(tiny_evalkit: TinyEvalkit) -> None:
    for name in ("run_evaluation.py", "requirements.txt", "vbvr_bench/evaluators/base_evaluator.py"):
        assert (tiny_evalkit.directory / name).is_file()
    assert source_sha256(tiny_evalkit.directory) == tiny_evalkit.sha256
