"""The evaluation-ready form of a rollout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import av
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


def by_ffprobe(path: Path) -> tuple[int, float, int, int, str]:
    """(decoded frames, seconds, height, width, frame rate) as FFmpeg's own program says, not PyAV."""
    command = ["ffprobe", "-v", "error", "-count_frames", "-select_streams", "v:0", "-of", "json"]
    fields = "stream=nb_read_frames,duration,height,width,avg_frame_rate:format=duration"
    done = subprocess.run(
        [*command, "-show_entries", fields, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answer = json.loads(done.stdout)
    (stream,) = answer["streams"]
    assert float(answer["format"]["duration"]) == pytest.approx(float(stream["duration"]), abs=2e-3)
    return (
        int(stream["nb_read_frames"]),
        float(stream["duration"]),
        stream["height"],
        stream["width"],
        stream["avg_frame_rate"],
    )


@pytest.mark.parametrize(("count", "fps"), [(1, 8), (5, 24), (9, 16), (49, 8), (81, 16), (81, 24)])
def test_every_frame_in_is_a_frame_out_at_its_time(count: int, fps: int, tmp_path: Path) -> None:
    """Rollouts that fit, are scaled, are padded, and are odd in size; grey levels tell their frames apart."""
    sizes = [(64, 64), (47, 63), (33, 64), (480, 832)] if count == 9 else [(47, 63)]
    # Farther apart than the codec errs, and never the same within 41 frames.
    levels = 20 + 5 * ((np.arange(count) * 7) % 41)
    for height, width in sizes:
        frames = np.empty((count, height, width, 3), dtype=np.uint8)
        frames[:] = levels[:, None, None, None]
        path = tmp_path / f"{height}x{width}.mp4"
        assert prepare_for_evaluation(frames, fps, 64, 64, 8, count / fps, path) == count
        seconds = count / fps
        assert by_ffprobe(path) == (count, pytest.approx(seconds, abs=1e-3), 64, 64, f"{fps}/1")
        with av.open(str(path)) as container:
            decoded = list(container.decode(video=0))
            stream = container.streams.video[0]
            assert stream.duration is not None and stream.time_base is not None
            assert float(stream.duration * stream.time_base) == pytest.approx(seconds, abs=1e-3)
        assert [frame.time for frame in decoded] == pytest.approx(np.arange(count) / fps, abs=1e-4)
        assert all((frame.height, frame.width) == (64, 64) for frame in decoded)
        middle = read_frames(path)[:, 28:36, 28:36].astype(float).mean(axis=(1, 2, 3))
        assert np.abs(middle - levels).max() < 2.0
