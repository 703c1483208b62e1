"""Reading without seeking: the evaluator's own frames, or its own loader; in the scorer, the same scores."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest

from wan_trainer.config.specs import DataSpec, RuleRewardSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.media import frame_times, read_frames, write_video
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.rewards.fast_decode import FastLoader, install
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.tiny.world import evalkit_source
from wan_trainer.types import RewardRequest, Sample, SampleId


def seeking(path: Any, max_frames: int = 100) -> list[np.ndarray]:
    """How evaluators of this kind read."""
    capture = cv2.VideoCapture(str(path))
    frames = []
    for index in range(min(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), max_frames)):
        capture.set(cv2.CAP_PROP_POS_FRAMES, index)
        ok, frame = capture.read()
        if not ok:
            break
        frames.append(frame)
    capture.release()
    return frames


VARIANTS: dict[str, Callable[..., Any]] = {
    "list of BGR": seeking,
    "array of RGB": lambda path, max_frames=100: np.stack(
        [cv2.cvtColor(frame, cv2.COLOR_BGR2RGB) for frame in seeking(path, max_frames)]
    ),
    "half size": lambda path: [cv2.resize(frame, (16, 16)) for frame in seeking(path)],
    "every second": lambda path: seeking(path)[::2],
    "floats": lambda path: [frame.astype(np.float32) for frame in seeking(path)],
}


@pytest.fixture
def clips(tmp_path: Path) -> list[str]:
    """Three noisy clips of one format."""
    paths = []
    for seed in range(3):
        frames = np.random.default_rng(seed).integers(0, 256, (13, 32, 32, 3), np.uint8)
        path = tmp_path / f"{seed}.mp4"
        write_video(path, frames, 16, crf=20)
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_frame_is_the_loaders_own_and_seeks_are_saved_where_that_is_proven(
    variant: str, clips: list[str]
) -> None:
    calls: list[str] = []

    def plain(path: Any, *limit: int) -> Any:
        calls.append(str(path))
        return VARIANTS[variant](path, *limit)

    loader = FastLoader(plain)
    for clip in clips:
        loader.candidate = clip
        found, expected = loader.load(clip), VARIANTS[variant](clip)
        assert type(found) is type(expected)
        assert len(found) == len(expected) and all(map(np.array_equal, found, expected))
    proven = variant in ("list of BGR", "array of RGB")
    assert calls == (clips[:1] if proven else clips)
    if variant == "list of BGR":
        # Another limit is another format, proven anew.
        assert [len(loader.load(clips[-1], 5)) for _ in range(2)] == [5, 5]
        assert len(calls) == 2


def test_a_ground_truth_is_read_once_and_cannot_be_drawn_into(clips: list[str]) -> None:
    calls: list[str] = []

    def plain(path: str) -> list[np.ndarray]:
        calls.append(path)
        return seeking(path)

    loader = FastLoader(plain, candidate="rollout.mp4")
    loader.load(clips[0])[0][:] = 0
    assert np.array_equal(loader.load(clips[0])[0], seeking(clips[0])[0])
    for clip in clips:
        assert all(map(np.array_equal, loader.load(clip), seeking(clip)))
    assert calls == clips[:1], "one format, proven once"
    assert len(loader.kept) == 2
    write_video(Path(clips[0]), np.zeros((3, 32, 32, 3), np.uint8), 16)
    assert len(loader.load(clips[0])) == 3, "a file that changed is another file"
    assert loader.load("missing.mp4") == []


def write(path: Path, frames: np.ndarray) -> str:
    write_video(path, frames, 16, crf=8)
    return str(path)


def alike(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("first", ["black", "grey", "still", "still in grey"])
@pytest.mark.parametrize("variant", ["array of RGB", "every second"])
def test_a_clip_that_tells_nothing_proves_nothing(
    first: str, variant: str, clips: list[str], tmp_path: Path
) -> None:
    noise = np.random.default_rng(9).integers(0, 256, (13, 32, 32, 3), np.uint8)
    frames = {
        "black": np.zeros_like(noise),
        "grey": np.repeat(noise[..., :1].mean(axis=(1, 2), keepdims=True).astype(np.uint8), 32, axis=1),
        "still": np.repeat(noise[:1], 13, axis=0),
        "still in grey": np.full_like(noise, 90),
    }[first]
    frames = np.broadcast_to(frames, noise.shape) if first == "grey" else frames
    loader = FastLoader(VARIANTS[variant])
    for clip in [write(tmp_path / "first.mp4", np.ascontiguousarray(frames)), *clips]:
        loader.candidate = clip
        assert alike(loader.load(clip), VARIANTS[variant](clip)), clip


class Instance:
    """An evaluator that reads by a method of its own."""

    def __init__(self, most: int) -> None:
        self.most = most

    def frames(self, path: str) -> list[np.ndarray]:
        return seeking(path, self.most)


def test_what_else_is_asked_for_is_part_of_the_format(clips: list[str], tmp_path: Path) -> None:
    def loader(path: str, mode: str = "", scale: float = 1.0, keep: Any = None) -> list[np.ndarray]:
        frames = seeking(path)
        frames = [cv2.cvtColor(frame, cv2.COLOR_BGR2RGB) for frame in frames] if mode == "rgb" else frames
        return frames[: int(scale * len(frames))] if keep is None else keep(frames)

    fast, odd = FastLoader(loader), lambda frames: frames[::-1]
    for clip in clips:
        fast.candidate = clip
        words: dict[str, Any]
        for words in ({}, {"mode": "rgb"}, {"scale": 0.5}, {"keep": odd}, {"mode": "rgb", "scale": 0.5}):
            assert alike(fast.load(clip, **words), loader(clip, **words)), words
    method = FastLoader(Instance.frames, method=True)
    for most in (13, 4, 9):
        for clip in clips:
            method.candidate = clip
            assert len(method.load(Instance(most), clip)) == most


def test_what_is_no_list_of_frames_is_handed_over_as_it_is(clips: list[str], tmp_path: Path) -> None:
    plains: tuple[Callable[[str], Any], ...] = (
        lambda path: (frame for frame in seeking(path)),
        lambda path: (seeking(path), 16.0),
        lambda path: {"frames": seeking(path)},
        lambda path: None,
    )
    for plain in plains:
        loader = FastLoader(plain)
        for clip in (*clips, clips[0]):
            found, expected = loader.load(clip), plain(clip)
            assert type(found) is type(expected)
            if isinstance(found, tuple):
                assert alike(found[0], expected[0])
                found[0][0][:] = 0  # drawn into
    picture = tmp_path / "picture.txt"
    picture.write_text("no video")
    assert FastLoader(seeking).load(str(picture)) == []


def test_files_that_count_or_time_otherwise_are_not_taken_for_their_like(tmp_path: Path) -> None:
    """The same codec, size, rate and number in the header; one starts later in its stream, one stutters."""
    frames = np.random.default_rng(3).integers(0, 256, (32, 32, 32, 3), np.uint8)
    even = coded(tmp_path / "even.mp4", frames, "libx264", range(32))
    trimmed = trim(even, tmp_path / "trimmed.mp4")
    stutter = coded(tmp_path / "stutter.mp4", frames, "libx264", [*range(10), *range(12, 33), 40])
    assert len(seeking(trimmed)) < 32 and len(frame_times(Path(trimmed))) == len(seeking(trimmed))
    assert len(read_frames(Path(trimmed))) == len(seeking(trimmed)), "hidden frames are no damage"
    loader = FastLoader(seeking)
    for path in (
        trimmed,
        even,
        stutter,
        even,
        trimmed,
        coded(tmp_path / "m.mp4", frames, "mpeg4", range(32)),
    ):
        assert alike(loader.load(path), seeking(path)), path


def coded(path: Path, frames: np.ndarray, codec: str, times: Iterable[int]) -> str:
    """An MP4 of the frames at these sixteenths of a second, a key frame every eight."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=16, options={"g": "8", "bf": "2"})
        assert isinstance(stream, av.VideoStream)
        _, stream.height, stream.width, _ = frames.shape
        stream.pix_fmt = "yuv420p"
        for time, pixels in zip(times, frames, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 16)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return str(path)


def trim(source: str, path: Path) -> str:
    """A copy that begins five frames in: by an edit list, as cutting without encoding does."""
    command = ["ffmpeg", "-v", "error", "-ss", "0.3", "-i", source, "-c", "copy", str(path)]
    subprocess.run(command, check=True, timeout=60)
    return str(path)


def test_without_a_loader_of_that_name_nothing_is_replaced() -> None:
    assert install() is None


def test_the_example_evaluator_scores_alike(spec: RuleRewardSpec, tiny_dataset: Path) -> None:
    kit = evalkit_source()
    data = DataSpec(tiny_dataset, None, 9, 64, 64, 16, False, 0, 0, 2, False)
    samples = [load_dataset(data)[index] for index in (0, 1)]
    scores: dict[bool, list[float]] = {}
    for fast in (True, False):
        pinned = replace(spec, evalkit_dir=kit, source_sha256=source_sha256(kit), fast_decode=fast)
        reward = RuleReward(pinned, [sample.task for sample in samples])
        scores[fast] = [score for sample in samples for score in _scores(reward, sample)]
        reward.close()
    assert scores[True] == scores[False]
    assert len(set(scores[True])) > 3 and max(scores[True]) > 0.9


def _scores(reward: RuleReward, sample: Sample) -> list[float]:
    """Of the ground truth, backwards, and shifted sideways."""
    assert sample.ground_truth_video is not None
    truth = read_frames(sample.ground_truth_video)
    videos = np.stack([truth, truth[::-1], np.roll(truth, 4, axis=2)])
    requests = [RewardRequest(SampleId(0, 0, member), sample) for member in range(3)]
    return [result.reward for result in reward.submit(videos, requests).result()]
