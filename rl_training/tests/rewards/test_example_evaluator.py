"""The evaluator that ships as an example satisfies the contract, through the same path as a real one."""

from __future__ import annotations

import dataclasses
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wan_trainer.config.specs import RuleRewardSpec
from wan_trainer.media import read_frames
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.tiny.tasks import TASKS, write_archives
from wan_trainer.types import RewardRequest, Sample, SampleId

TINY_EVALKIT = Path(__file__).parents[2] / "examples" / "tiny_evalkit"


def _samples(root: Path) -> list[Sample]:
    samples: list[Sample] = []
    for archive in write_archives(root, samples_per_task=1):
        with tarfile.open(archive) as packed:
            packed.extractall(root / "raw", filter="data")
        task = archive.name.removesuffix(".tar.gz")
        (place,) = (root / "raw" / task).glob("*/*")
        samples.append(
            Sample(
                sample_id=f"{task}/{place.name}",
                task=task,
                prompt=(place / "video" / "prompt.txt").read_text(),
                first_frame=place / "first_frame.png",
                ground_truth_video=place / "video" / "ground_truth.mp4",
                final_frame=place / "video" / "final_frame.png",
                metadata=place / "metadata.json",
            )
        )
    return samples


def test_the_example_evaluator_ranks_clips(
    spec: RuleRewardSpec, tmp_path: Path, make_clips: Callable[[np.ndarray], dict[str, np.ndarray]]
) -> None:
    changed = dataclasses.replace(
        spec, evalkit_dir=TINY_EVALKIT, source_sha256=source_sha256(TINY_EVALKIT), fps=16, workers=2
    )
    reward = RuleReward(changed, [task.name for task in TASKS])
    try:
        for sample in _samples(tmp_path):
            assert sample.ground_truth_video is not None
            clips = make_clips(read_frames(sample.ground_truth_video))
            requests = [RewardRequest(SampleId(0, 0, member), sample) for member in range(len(clips))]
            results = reward.submit(np.stack(list(clips.values())), requests).result()
            assert all(result.valid for result in results), results
            scores = {name: result.reward for name, result in zip(clips, results, strict=True)}
            assert scores["truth"] > 0.9
            assert all(scores[name] < scores["truth"] / 2 for name in clips if name != "truth"), scores
    finally:
        reward.close()


@pytest.fixture
def make_clips() -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """The truth, and clips that must not pass for it."""

    def make(truth: np.ndarray) -> dict[str, np.ndarray]:
        order = list(range(len(truth)))
        random.Random(1).shuffle(order)
        return {
            "truth": truth,
            "static": np.repeat(truth[:1], len(truth), axis=0),
            "black": np.zeros_like(truth),
            "reversed": truth[::-1],
            "shuffled": truth[order],
        }

    return make
