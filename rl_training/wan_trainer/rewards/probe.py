"""Trying a reward on clips whose worth is known, through the same calls as a run."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wan_trainer.config.specs import DataSpec
from wan_trainer.rewards.clips import BLACK, CLIPS, GROUND_TRUTH, SHUFFLED, STATIC, probe_clips
from wan_trainer.types import Reward, RewardRequest, RewardResult, Sample, SampleId, UserError, first_line

SUSPICIOUS_SHARE = 0.5
"""Of the ground truth's reward: a worthless clip that earns as much can be learnt."""

WORTHLESS = (STATIC, BLACK, SHUFFLED)
"""Clips that solve no task. The reversed one is only shown: a few tasks look the same backwards."""


@dataclass(frozen=True)
class Probe:
    """The verdicts on one sample's clips, by the clip's name."""

    sample: Sample
    results: Mapping[str, RewardResult]

    @property
    def suspicious(self) -> dict[str, float]:
        """Worthless clips that score too well, with their rewards."""
        truth = self.results.get(GROUND_TRUTH)
        if truth is None or not truth.valid:
            return {}
        return {
            name: result.reward
            for name, result in self.results.items()
            if name in WORTHLESS and result.valid and _rivals(result.reward, truth.reward)
        }


@dataclass(frozen=True)
class TaskProbe:
    """The probes of one task. means: reward by clip over the samples that have a verdict, nan without one."""

    task: str
    probes: tuple[Probe, ...]

    @property
    def means(self) -> dict[str, float]:
        """The mean reward of each clip."""
        return {name: _mean(self.probes, name) for name in CLIPS}

    @property
    def problems(self) -> list[str]:
        """What speaks against training on the task, one line each."""
        means = self.means
        truth = means[GROUND_TRUTH]
        lines = [
            f"task {self.task}: the {name} clip scores {means[name]:.3f}, the ground truth {truth:.3f}: "
            "a policy can learn that instead of the task; mend its evaluator or leave the task out"
            for name in WORTHLESS
            if _rivals(means[name], truth)
        ]
        for probe in self.probes:
            for name, result in probe.results.items():
                if not result.valid:
                    lines.append(
                        f"task {self.task}: the {name} clip of {probe.sample.sample_id} has no score "
                        f"({result.error})"
                    )
        return lines


def probe_reward(
    reward: Reward,
    data: DataSpec,
    samples: Sequence[Sample],
    names: Collection[str] = CLIPS,
    *,
    budget_s: float | None = None,
) -> Iterator[Probe]:
    """The reward's verdicts on the clips of each sample; the clips of one sample are scored side by side.

    Once budget_s seconds have passed no further sample is begun. A sample whose files cannot be read has no
    verdict on its ground truth.
    """
    started = time.monotonic()
    for index, sample in enumerate(samples):
        if budget_s is not None and time.monotonic() - started > budget_s:
            return
        try:
            clips = probe_clips(sample, data, names)
        except UserError as error:  # one broken file costs its sample, and not the table of all tasks
            yield Probe(sample, {GROUND_TRUTH: _unread(index, error)})
            continue
        pending = {
            name: reward.submit(
                np.ascontiguousarray(clip)[None], [RewardRequest(SampleId(0, index, member), sample)]
            )
            for member, (name, clip) in enumerate(clips.items())
        }
        yield Probe(sample, {name: verdict.result()[0] for name, verdict in pending.items()})


def by_task(probes: Sequence[Probe]) -> list[TaskProbe]:
    """The probes of each task, in order of appearance."""
    groups: dict[str, list[Probe]] = {}
    for probe in probes:
        groups.setdefault(probe.sample.task, []).append(probe)
    return [TaskProbe(task, tuple(group)) for task, group in groups.items()]


def _rivals(reward: float, truth: float) -> bool:
    """Whether a worthless clip earns so much that it can be learnt; false where one is nan.

    Half of a negative truth would be more than the truth.
    """
    return reward >= (SUSPICIOUS_SHARE * truth if truth > 0 else truth)


def _unread(index: int, error: UserError) -> RewardResult:
    return RewardResult(SampleId(0, index, 0), math.nan, error=first_line(error))


def _mean(probes: Sequence[Probe], name: str) -> float:
    valid = [
        probe.results[name].reward for probe in probes if name in probe.results and probe.results[name].valid
    ]
    return sum(valid) / len(valid) if valid else float("nan")
