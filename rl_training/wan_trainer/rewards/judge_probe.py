"""Trying a judge on clips whose worth is known: ground truth, a still picture, black."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wan_trainer.config.specs import DataSpec, VlmRewardSpec
from wan_trainer.media import fill_and_crop, probe_video, read_frames, read_image
from wan_trainer.rewards.judge import VlmReward
from wan_trainer.types import RewardRequest, RewardResult, Sample, SampleId

GROUND_TRUTH, STATIC, BLACK = "ground truth", "static", "black"
SUSPICIOUS_SHARE = 0.5
"""Of the ground truth's reward: a worthless clip that earns as much can be learnt."""


@dataclass(frozen=True)
class Probe:
    """The verdicts on one sample's clips, by the clip's name."""

    sample: Sample
    results: Mapping[str, RewardResult]

    @property
    def suspicions(self) -> list[str]:
        """Worthless clips that score too well, one line each."""
        truth = self.results.get(GROUND_TRUTH)
        if truth is None or not truth.valid:
            return []
        return [
            f"{self.sample.sample_id}: the {name} clip scores {result.reward:.3f}, the ground truth "
            f"{truth.reward:.3f}: sharpen the rubric of {self.sample.task}, or use another judge"
            for name, result in self.results.items()
            if name != GROUND_TRUTH and result.valid and result.reward >= SUSPICIOUS_SHARE * truth.reward
        ]


def probe_clips(sample: Sample, data: DataSpec) -> dict[str, np.ndarray]:
    """Clips of the run's shape for one sample, uint8 (F, H, W, 3); without ground truth only the others.

    A ground truth that is longer than a rollout is thinned evenly, last frame included. Raises UserError for
    a file that cannot be read.
    """
    clips: dict[str, np.ndarray] = {}
    if sample.ground_truth_video is not None:
        frames = read_frames(sample.ground_truth_video, _indices(sample, data.num_frames))
        clips[GROUND_TRUTH] = fill_and_crop(frames, data.height, data.width)
    if sample.first_frame is not None:
        still = fill_and_crop(read_image(sample.first_frame)[None], data.height, data.width)
        clips[STATIC] = np.repeat(still, data.num_frames, axis=0)
    clips[BLACK] = np.zeros((data.num_frames, data.height, data.width, 3), dtype=np.uint8)
    return clips


def probe_judge(spec: VlmRewardSpec, data: DataSpec, samples: Sequence[Sample]) -> Iterator[Probe]:
    """The judge's verdicts on the clips of each sample, asked for as a run asks.

    A failed verdict is an error here, whatever the run makes of it. Raises UserError when the rubrics cannot
    be used or a sample cannot be read.
    """
    asked = replace(
        spec, validate_service=False, error_score=None, log_first_n=0, max_pending_jobs=len(_NAMES)
    )
    reward = VlmReward(asked, [sample.task for sample in samples])
    try:
        for index, sample in enumerate(samples):
            clips = probe_clips(sample, data)
            pending = {
                name: reward.submit(clip[None], [RewardRequest(SampleId(0, index, member), sample)])
                for member, (name, clip) in enumerate(clips.items())
            }
            yield Probe(sample, {name: verdict.result()[0] for name, verdict in pending.items()})
    finally:
        reward.close()


_NAMES = (GROUND_TRUTH, STATIC, BLACK)


def _indices(sample: Sample, num_frames: int) -> list[int] | None:
    assert sample.ground_truth_video is not None
    count = probe_video(sample.ground_truth_video).num_frames
    if count <= num_frames:
        return None
    return [round(index) for index in np.linspace(0, count - 1, num_frames).tolist()]
