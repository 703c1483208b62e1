"""Video files against OpenCV's independent reader and against frames whose content is their index."""

from __future__ import annotations

import subprocess
import sys
import wave
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from av.error import FFmpegError

from wan_trainer.media import frame_times, probe_video, read_frames, write_video
from wan_trainer.types import UserError

LEVELS_APART = 5


def numbered_frames(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Frame i has grey level 20 + 5 i, and a white square that moves, so that B-frames are worth coding."""
    frames = np.empty((count, height, width, 3), dtype=np.uint8)
    for index in range(count):
        frames[index] = 20 + LEVELS_APART * index
        frames[index, 8:16, index : index + 8] = 255
    return frames


def numbers_of(frames: np.ndarray) -> list[int]:
    corner = frames[:, 24:, :, :].astype(np.float64).mean(axis=(1, 2, 3))
    return [round((level - 20) / LEVELS_APART) for level in corner]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_video(path, numbered_frames(33), 16, crf=10)
    return path


def test_every_frame_comes_back_in_order(clip: Path) -> None:
    frames = read_frames(clip)
    assert frames.shape == (33, 48, 64, 3) and frames.dtype == np.uint8
    assert numbers_of(frames) == list(range(33))
    assert np.abs(frames.astype(int) - numbered_frames(33)).mean() < 2


def test_frames_are_selected_exactly_in_any_order_with_repeats(clip: Path) -> None:
    wanted = [32, 0, 7, 7, 31, 1, 16]
    assert numbers_of(read_frames(clip, wanted)) == wanted
    everything = read_frames(clip)
    for index in range(33):
        assert np.array_equal(read_frames(clip, [index])[0], everything[index])


def test_colours_and_order_agree_with_opencv(clip: Path) -> None:
    reader = cv2.VideoCapture(str(clip))
    ours = read_frames(clip)
    for frame in ours:
        there, bgr = reader.read()
        assert there
        assert np.abs(frame.astype(int) - bgr[..., ::-1]).mean() < 1.5
    assert not reader.read()[0]


def test_colour_survives(tmp_path: Path) -> None:
    frames = np.zeros((3, 32, 32, 3), dtype=np.uint8)
    frames[:] = (200, 40, 90)
    write_video(tmp_path / "colour.mp4", frames, 8, crf=5)
    assert np.abs(read_frames(tmp_path / "colour.mp4").astype(int) - (200, 40, 90)).max() <= 4


@pytest.mark.parametrize("fps", [1, 16, 7.5, Fraction(30000, 1001)])
def test_frame_rate_and_count_are_what_was_passed(tmp_path: Path, fps: float | Fraction) -> None:
    path = tmp_path / "rate.mp4"
    write_video(path, numbered_frames(5), fps)
    info = probe_video(path)
    assert (info.num_frames, info.height, info.width, info.codec) == (5, 48, 64, "h264")
    assert info.fps == pytest.approx(float(fps), rel=1e-6)
    assert len(read_frames(path)) == 5


def test_a_single_frame_is_a_video(tmp_path: Path) -> None:
    write_video(tmp_path / "one.mp4", numbered_frames(1), 16)
    assert read_frames(tmp_path / "one.mp4").shape == (1, 48, 64, 3)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_decoding_threads_do_not_change_frames(clip: Path, threads: int) -> None:
    assert np.array_equal(read_frames(clip, threads=threads), read_frames(clip))


def test_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    write_video(tmp_path / "a.mp4", frames, 16, crf=20)
    write_video(tmp_path / "b.mp4", frames, 16, crf=20)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_lower_crf_keeps_more(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    write_video(tmp_path / "fine.mp4", frames, 16, crf=8)
    write_video(tmp_path / "coarse.mp4", frames, 16, crf=40)
    assert (tmp_path / "fine.mp4").stat().st_size > 3 * (tmp_path / "coarse.mp4").stat().st_size


@pytest.mark.parametrize(("height", "width", "remedy"), [(47, 64, "48x64"), (48, 63, "48x64"), (1, 1, "2x2")])
def test_odd_sizes_are_refused_and_nothing_is_written(
    tmp_path: Path, height: int, width: int, remedy: str
) -> None:
    with pytest.raises(UserError, match=remedy):
        write_video(tmp_path / "odd.mp4", np.zeros((2, height, width, 3), np.uint8), 16)
    assert list(tmp_path.iterdir()) == []


def test_impossible_rates_and_empty_videos_are_refused(tmp_path: Path) -> None:
    for fps in (0, -1, float("nan")):
        with pytest.raises(UserError, match="positive rate"):
            write_video(tmp_path / "x.mp4", numbered_frames(2), fps)
    with pytest.raises(UserError, match="empty"):
        write_video(tmp_path / "x.mp4", numbered_frames(0), 16)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_video(path, numbered_frames(3), 16)
    before = path.read_bytes()
    with pytest.raises(FFmpegError):
        write_video(path, numbered_frames(3), 16, preset="no such preset")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def one_line(error: UserError, path: Path) -> str:
    (line,) = error.problems
    assert str(path) in line and "\n" not in line
    return line


def test_too_short_names_the_frame(clip: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_frames(clip, [0, 33])
    assert "has 33 frames, frame 33 is needed" in one_line(caught.value, clip)


def test_impossible_indices_are_refused(clip: Path) -> None:
    for indices in ([-1], []):
        with pytest.raises(UserError, match="0 or greater"):
            read_frames(clip, indices)


def test_missing_and_foreign_files_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_frames(tmp_path / "none.mp4")
    assert "no such video" in one_line(caught.value, tmp_path / "none.mp4")
    for name, content in (("empty.mp4", b""), ("text.mp4", b"not a video at all\n" * 50)):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_frames(path)
        assert "not a readable video" in one_line(caught.value, path)


def test_a_file_without_pictures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(1600))
    with pytest.raises(UserError) as caught:
        probe_video(path)
    assert "no video stream" in one_line(caught.value, path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_videos_are_refused(clip: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.mp4"
    content = clip.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError) as caught:
        read_frames(path)
    one_line(caught.value, path)


def test_a_file_that_ends_between_two_frames_is_refused_by_its_packets_too(
    clip: Path, tmp_path: Path
) -> None:
    assert frame_times(clip) == sorted(set(frame_times(clip))) and len(frame_times(clip)) == 33
    whole, cut = tmp_path / "whole.mp4", tmp_path / "cut.mp4"
    with (
        av.open(str(clip)) as source,
        av.open(str(whole), "w", options={"movflags": "faststart"}) as target,
    ):
        copied = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = copied
                target.mux(packet)
    with av.open(str(whole)) as container:
        ends = [packet.pos + packet.size for packet in container.demux(video=0) if packet.size]
    assert len(frame_times(whole)) == 33
    cut.write_bytes(whole.read_bytes()[: ends[8]])
    for read in (frame_times, read_frames):
        with pytest.raises(UserError) as caught:
            read(cut)
        one_line(caught.value, cut)


def painted_over(path: Path) -> bool:
    """Whether FFmpeg hands out every frame of a damaged file, one of them with invented content."""
    try:
        with av.open(str(path)) as container:
            return any([frame.is_corrupt for frame in container.decode(video=0)])
    except FFmpegError:
        return False


def test_damage_inside_is_refused_not_painted_over(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.mp4", tmp_path / "damaged.mp4"
    frames = np.random.default_rng(0).integers(0, 256, (6, 96, 96, 3), dtype=np.uint8)
    write_video(whole, frames, 16, crf=10)
    content = whole.read_bytes()
    concealed = 0
    for start in range(len(content) // 4, 3 * len(content) // 4, len(content) // 60):
        middle = bytes(byte ^ 0x5A for byte in content[start : start + 40])
        path.write_bytes(content[:start] + middle + content[start + 40 :])
        if not painted_over(path):
            continue
        concealed += 1
        with pytest.raises(UserError) as caught:
            read_frames(path)
        assert "is damaged; replace the file" in one_line(caught.value, path)
    assert concealed > 0, "no damage of this test was of the kind that FFmpeg conceals"


def test_media_needs_no_torch() -> None:
    code = "import sys, wan_trainer.media; print(sorted({'torch', 'cv2', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
