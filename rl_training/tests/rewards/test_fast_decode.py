"""Reading without seeking: the evaluator's own frames, or its own loader; in the scorer, the same scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from wan_trainer.config.specs import DataSpec, RuleRewardSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.media import read_frames, write_video
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
