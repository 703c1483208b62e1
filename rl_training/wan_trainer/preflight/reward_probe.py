"""Clips whose worth is known, scored by the evaluator of a run before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wan_trainer.config.specs import DataSpec, RuleRewardSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.preflight.finding import Finding
from wan_trainer.rewards.clips import CLIPS
from wan_trainer.rewards.probe import TaskProbe, by_task, probe_reward
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.types import Sample, UserError

PREFLIGHT_TASKS = 8
PREFLIGHT_BUDGET_S = 30.0
"""After this no further task is begun; a clip that takes as long itself counts as without a score."""


def probe_evaluator(
    spec: RuleRewardSpec, data: DataSpec, samples: Sequence[Sample], *, budget_s: float | None = None
) -> list[TaskProbe]:
    """The evaluator's verdicts on the clips of `samples`, as a run asks for them; see `probe_reward`.

    Raises UserError when the evaluator cannot be used.
    """
    tried = replace(
        spec,
        workers=min(spec.workers, len(CLIPS)),
        max_pending_jobs=len(CLIPS),
        timeout_s=spec.timeout_s if budget_s is None else min(spec.timeout_s, budget_s),
        keep_tmp=False,
    )
    reward = RuleReward(tried, list(dict.fromkeys(sample.task for sample in samples)))
    try:
        return by_task(list(probe_reward(reward, data, samples, budget_s=budget_s)))
    finally:
        reward.close()


def first_of_each_task(dataset: Dataset, count: int) -> list[Sample]:
    """The first `count` samples of every task; reads no other."""
    left = dict.fromkeys(dataset.tasks, count)
    chosen: list[int] = []
    for index, task in enumerate(dataset.sample_tasks()):
        if left[task]:
            left[task] -= 1
            chosen.append(index)
    return [dataset[index] for index in chosen]


def check_probes(spec: RuleRewardSpec, data: DataSpec) -> list[Finding]:
    """Warnings about tasks that a worthless clip solves, over a few tasks spread over the dataset."""
    try:
        samples = first_of_each_task(load_dataset(data), 1)
        step = max(1, len(samples) // PREFLIGHT_TASKS)
        tried = samples[::step][:PREFLIGHT_TASKS]
        probes = probe_evaluator(spec, data, tried, budget_s=PREFLIGHT_BUDGET_S)
    except UserError as error:
        return [Finding(f"probes not made: {line}", "warning") for line in error.problems]
    problems = [Finding(line, "warning") for probe in probes for line in probe.problems]
    note = f"probes: {len(probes)} of {len(samples)} tasks tried, {len(problems)} warnings"
    return [*problems, Finding(f"{note}; wan-trainer probe-reward tries all of them", "note")]
