"""The form in which a rollout reaches an evaluator."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np

from wan_trainer.media.image import fit_and_pad
from wan_trainer.media.video import write_video


def kept_frames(num_frames: int, fps: float | Fraction, max_duration_s: float) -> int:
    """How many of `num_frames` frames fit into max_duration_s seconds at `fps`; at least one.

    Preflight asks the same function whether a rollout would lose its tail, so that warning and cut agree.
    """
    # 5.0625 s at 16 fps is 81 frames; the tolerance keeps products that rounding left just short.
    fitting = math.floor(float(fps) * max_duration_s + 1e-6)
    return max(1, min(num_frames, fitting))


def prepare_for_evaluation(
    frames: np.ndarray,
    fps: float | Fraction,
    width: int,
    height: int,
    crf: float,
    max_duration_s: float,
    path: Path,
    *,
    threads: int = 1,
) -> int:
    """Write a decoded rollout, uint8 (F, H, W, 3) RGB, as the evaluator's MP4; returns its number of frames.

    The tail beyond max_duration_s seconds is cut, frames are scaled to fit width x height and padded, and
    encoded as H.264 at `crf`. The preset only trades speed for file size: crf fixes the quality.
    """
    kept = frames[: kept_frames(len(frames), fps, max_duration_s)]
    write_video(path, fit_and_pad(kept, height, width), fps, crf=crf, preset="veryfast", threads=threads)
    return len(kept)
