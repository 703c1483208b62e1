# ruff: noqa: T201
"""Videos a second of the rule reward against the path that writes each rollout twice and seeks every frame.

    python benchmarks/rule_reward.py [--frames 81] [--size 1024]

Both sides score the same two rollouts, a clean and a noisy one, of one sample, with the same evaluator in
one worker with one thread, after a warm-up on another sample. Two-step: the rollout is written as an MP4,
re-encoded by ffmpeg to the prepared size, and scored with a loader that seeks to every frame, as OpenCV's
users do; the ground truth is read again for every rollout. Ours: the rollout reaches the scorer in memory, is
encoded once, and like the ground truth it is read from start to end, which was proven equal for both formats
during the warm-up; the ground truth is read once.
A third run, ours with the evaluator's own loader, shows that the faster reading changes no score.

The last line is one JSON object with both sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from wan_trainer.config.specs import RuleRewardSpec
from wan_trainer.media import write_image, write_video
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.types import RewardRequest, Sample, SampleId

FPS, CRF = 16, 18
TASK = "moving_square"

LOADER = '''"""Reads frames as OpenCV's users do."""
import time
import cv2

SECONDS = {"decode": 0.0}

def get_video_frames(video_path, max_frames=100):
    started = time.monotonic()
    capture = cv2.VideoCapture(str(video_path))
    frames = []
    for index in range(min(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), max_frames)):
        capture.set(cv2.CAP_PROP_POS_FRAMES, index)
        ok, frame = capture.read()
        if not ok:
            break
        frames.append(frame)
    capture.release()
    SECONDS["decode"] += time.monotonic() - started
    return frames
'''
EVALUATOR = '''"""How alike two clips are, frame by frame at a quarter of the size."""
import time
import cv2
import numpy as np
from vbvr_bench.evaluators import base_evaluator

TASK_EVALUATOR_MAP = {"moving_square": None}

def evaluate_single_video(video_path, task_name, gt_info, device="cpu"):
    started = time.monotonic()
    frames = base_evaluator.get_video_frames(video_path)
    truth = base_evaluator.get_video_frames(gt_info["gt_video_path"])
    read = time.monotonic() - started
    started = time.monotonic()
    if len(frames) != len(truth):
        return {"score": 0.0, "error": f"{len(frames)} frames, the ground truth has {len(truth)}"}
    small = lambda frame: cv2.resize(frame, None, fx=0.25, fy=0.25, interpolation=cv2.INTER_AREA)
    distance = [np.abs(small(a).astype(float) - small(b)).mean() for a, b in zip(frames, truth)]
    score = float(np.exp(-np.mean(distance) / 64))
    # Not scores: seconds, kept in [0, 1) for the report.
    times = {"decode_ks": read / 1000, "score_ks": (time.monotonic() - started) / 1000}
    return {"score": score, "dimensions": times, "details": {"video_frame_count": len(frames)}}
'''


def write_evaluator(root: Path) -> Path:
    """A checkout at the contract of the public evaluator."""
    package = root / "evalkit" / "vbvr_bench" / "evaluators"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").write_text("")
    (package / "base_evaluator.py").write_text(LOADER)
    (root / "evalkit" / "run_evaluation.py").write_text(EVALUATOR)
    return root / "evalkit"


def make_clip(frames: int, size: int, noise: float, seed: int) -> np.ndarray:
    """A square that slides to the right on a smooth ground, uint8 (F, H, W, 3)."""
    generator = np.random.default_rng(seed)
    ramp = np.linspace(40, 200, size).astype(np.float32)
    ground = np.stack([np.broadcast_to(ramp, (size, size)), np.broadcast_to(ramp[:, None], (size, size))], -1)
    ground = np.concatenate([ground, np.full((size, size, 1), 90.0, np.float32)], -1)
    clip = np.empty((frames, size, size, 3), np.uint8)
    side = size // 8
    for index in range(frames):
        frame = ground.copy()
        left = (size - side) * index // max(1, frames - 1)
        frame[size // 2 : size // 2 + side, left : left + side] = (230, 30, 40)
        if noise:
            frame += generator.normal(0, noise, frame.shape).astype(np.float32)
        clip[index] = frame.clip(0, 255)
    return clip


def write_sample(root: Path, name: str, clip: np.ndarray) -> Sample:
    """The files of one sample, its ground truth being `clip`."""
    directory = root / "samples" / name
    directory.mkdir(parents=True)
    write_video(directory / "ground_truth.mp4", clip, FPS, crf=CRF)
    write_image(directory / "first_frame.png", clip[0])
    write_image(directory / "final_frame.png", clip[-1])
    (directory / "metadata.json").write_text("{}")
    return Sample(
        sample_id=f"{TASK}/{name}",
        task=TASK,
        prompt="The square moves right.",
        first_frame=directory / "first_frame.png",
        ground_truth_video=directory / "ground_truth.mp4",
        final_frame=directory / "final_frame.png",
        metadata=directory / "metadata.json",
    )


class TwoSteps:
    """Write, re-encode with ffmpeg, score: one after another in this process, one thread each."""

    def __init__(self, evalkit: Path, root: Path, size: int) -> None:
        sys.path.insert(0, str(evalkit))
        spec = importlib.util.spec_from_file_location("run_evaluation", evalkit / "run_evaluation.py")
        assert spec is not None and spec.loader is not None
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        self._root, self._size = root, size

    def score(self, video: np.ndarray, sample: Sample) -> dict[str, float]:
        """Score and seconds of each part."""
        raw, prepared = self._root / "raw.mp4", self._root / "prepared.mp4"
        started = time.monotonic()
        write_video(raw, video, FPS, crf=CRF)
        fit = f"scale={self._size}:{self._size}:force_original_aspect_ratio=decrease"
        command = ["ffmpeg", "-y", "-v", "error", "-threads", "1", "-i", str(raw), "-threads", "1"]
        command += ["-vf", f"{fit},pad={self._size}:{self._size}:-1:-1", "-r", str(FPS), "-t", "10"]
        command += ["-c:v", "libx264", "-preset", "veryfast", "-crf", str(CRF), "-pix_fmt", "yuv420p"]
        subprocess.run([*command, str(prepared)], check=True)
        encoded = time.monotonic()
        info = {"gt_video_path": str(sample.ground_truth_video)}
        result = self._module.evaluate_single_video(str(prepared), TASK, info)
        assert "error" not in result, result
        return _parts(result["score"], encoded - started, result["dimensions"])


class Ours:
    """The rule reward with one worker."""

    def __init__(self, spec: RuleRewardSpec) -> None:
        self._reward = RuleReward(spec, [TASK])

    def score(self, video: np.ndarray, sample: Sample) -> dict[str, float]:
        """Score and seconds of each part; what is neither reading nor scoring is encoding."""
        (result,) = self._reward.submit(video[None], [RewardRequest(SampleId(0, 0, 0), sample)]).result()
        assert result.valid, result
        read = 1000 * (result.components["decode_ks"] + result.components["score_ks"])
        return _parts(result.reward, result.ended - result.started - read, result.components)

    def close(self) -> None:
        self._reward.close()


def _parts(score: float, encode_s: float, dimensions: Any) -> dict[str, float]:
    decode_s, score_s = 1000 * dimensions["decode_ks"], 1000 * dimensions["score_ks"]
    return {"score": score, "encode_s": encode_s, "decode_s": decode_s, "score_s": score_s}


def measure(side: Any, warm_up: tuple[np.ndarray, Sample], timed: list[np.ndarray], sample: Sample) -> Any:
    """Scores, seconds of each part, and videos a second of the timed rollouts."""
    started = time.monotonic()
    side.score(*warm_up)
    warm_s, started = time.monotonic() - started, time.monotonic()
    rows = [side.score(video, sample) for video in timed]
    elapsed = time.monotonic() - started
    parts = {name: round(sum(row[name] for row in rows), 2) for name in ("encode_s", "decode_s", "score_s")}
    speed = {"videos_per_s": round(len(rows) / elapsed, 4), "warm_up_s": round(warm_s, 1)}
    return [row["score"] for row in rows], parts | speed


def compare(root: Path, frames: int, size: int) -> dict[str, Any]:
    evalkit = write_evaluator(root)
    clean, noisy = make_clip(frames, size, 0.0, 0), make_clip(frames, size, 12.0, 1)
    warm_up = (clean, write_sample(root, "warm_up", clean))
    sample = write_sample(root, "timed", make_clip(frames, size, 2.0, 2))
    spec = RuleRewardSpec(
        evalkit_dir=evalkit,
        source_sha256=source_sha256(evalkit),
        easyocr_module_path=None,
        device="cpu",
        fps=FPS,
        prepared_width=size,
        prepared_height=size,
        prepare_crf=CRF,
        max_duration_s=10.0,
        workers=1,
        threads_per_worker=1,
        max_pending_jobs=4,
        timeout_s=600.0,
        unsupported_score=None,
        task_specific_only=True,
        tmp_dir=root / "scratch",
        keep_tmp=False,
        fast_decode=True,
        weights=(("score", 1.0),),
    )
    sides: dict[str, Any] = {}
    scores: dict[str, list[float]] = {}
    for name in ("ours", "ours_seeking", "two_steps"):
        if name == "two_steps":
            side: Any = TwoSteps(evalkit, root, size)
        else:
            side = Ours(replace(spec, fast_decode=name == "ours"))
        scores[name], sides[name] = measure(side, warm_up, [clean, noisy], sample)
        print(f"{name}: {sides[name]}, scores {scores[name]}", flush=True)
        if name != "two_steps":
            side.close()
    if scores["ours"] != scores["ours_seeking"]:
        raise SystemExit("the faster reading changes a score")
    difference = max(abs(a - b) for a, b in zip(scores["ours"], scores["two_steps"], strict=True))
    return {
        "frames": frames,
        "size": size,
        **sides,
        "largest_score_difference": round(difference, 5),
        "speedup": round(sides["ours"]["videos_per_s"] / sides["two_steps"]["videos_per_s"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--size", type=int, default=1024)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory(prefix="rule-reward-") as root:
        print(json.dumps(compare(Path(root), arguments.frames, arguments.size)))


if __name__ == "__main__":
    main()
