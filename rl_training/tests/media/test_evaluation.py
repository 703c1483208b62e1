"""The evaluation-ready form of a rollout."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from wan_trainer.media import kept_frames, prepare_for_evaluation, probe_video, read_frames


@pytest.mark.parametrize(
    ("frames", "fps", "seconds", "kept"),
    [
        (81, 16, 5.0625, 81),  # the 5B recipes: nothing is lost
        (161, 16, 5.0, 80),  # the A14B recipe: the second half is
        (81, 16, 5.0, 80),
        (5, 16, 0.01, 1),
        (30, 29.97, 1.0, 29),
        (30, 30, 0.1, 3),
        (100, 100, 0.29, 29),  # 28.999999999999996 in floating point
    ],
)
def test_what_fits_the_duration(frames: int, fps: float, seconds: float, kept: int) -> None:
    assert kept_frames(frames, fps, seconds) == kept


def test_the_tail_is_cut_and_frames_are_padded(tmp_path: Path) -> None:
    frames = np.zeros((12, 32, 64, 3), dtype=np.uint8)
    frames[:] = (np.arange(12) * 20)[:, None, None, None]
    path = tmp_path / "prepared.mp4"
    assert prepare_for_evaluation(frames, 8, 96, 96, 12, 1.0, path) == 8
    info = probe_video(path)
    assert (info.num_frames, info.fps, info.height, info.width, info.codec) == (8, 8.0, 96, 96, "h264")
    result = read_frames(path).astype(int)
    assert np.abs(result[:, 30:66].mean(axis=(1, 2, 3)) - np.arange(8) * 20).max() < 3
    assert result[:, :20].max() < 12 and result[:, -20:].max() < 12


def test_an_evaluator_that_reads_with_opencv_sees_the_rollout(tmp_path: Path) -> None:
    frames = np.full((4, 32, 32, 3), (220, 30, 60), dtype=np.uint8)
    path = tmp_path / "prepared.mp4"
    prepare_for_evaluation(frames, 16, 64, 64, 12, 5.0625, path)
    there, bgr = cv2.VideoCapture(str(path)).read()
    assert there and bgr.shape == (64, 64, 3)
    assert np.abs(bgr[16:48, 16:48, ::-1].astype(int) - (220, 30, 60)).max() <= 6
