"""Trying a judge on clips whose worth is known: ground truth, a still picture, black."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from wan_trainer.config.specs import DataSpec, VlmRewardSpec
from wan_trainer.rewards.clips import BLACK, GROUND_TRUTH, STATIC
from wan_trainer.rewards.judge import VlmReward
from wan_trainer.rewards.probe import Probe, probe_reward
from wan_trainer.types import Sample

CLIPS_JUDGED = (GROUND_TRUTH, STATIC, BLACK)


def probe_judge(spec: VlmRewardSpec, data: DataSpec, samples: Sequence[Sample]) -> Iterator[Probe]:
    """The judge's verdicts on the clips of each sample, asked for as a run asks.

    A failed verdict is an error here, whatever the run makes of it. Raises UserError when the rubrics cannot
    be used.
    """
    asked = replace(
        spec, validate_service=False, error_score=None, log_first_n=0, max_pending_jobs=len(CLIPS_JUDGED)
    )
    reward = VlmReward(asked, [sample.task for sample in samples])
    try:
        yield from probe_reward(reward, data, samples, CLIPS_JUDGED)
    finally:
        reward.close()
