"""Gathering the rewards of a wave over all ranks, and what is reported of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from wan_trainer.algorithms.protocols import Communicator
from wan_trainer.types import RewardResult, RewardTable, RunFailure, SampleId, Wave


def own_rewards(wave: Wave) -> list[RewardResult]:
    """Wait for the verdicts on this rank's submissions of `wave`."""
    return [result for pending in wave.pending for result in pending.result()]


def gather_rewards(
    own: Sequence[RewardResult],
    prompts: tuple[int, ...],
    step: int,
    group_size: int,
    communicator: Communicator,
) -> RewardTable:
    """Exchange the verdicts of all ranks on the wave of `prompts`: the table is the same on every rank.

    Verdicts are placed by the identity they carry, never by the order they arrive in, so no sample can be
    given another's reward. Raises RunFailure, on every rank, when a (prompt, member) is missing, doubled or
    foreign.
    """
    gathered = [result for part in communicator.gather_objects(list(own)) for result in part]
    expected = [SampleId(step, prompt, member) for prompt in prompts for member in range(group_size)]
    counts = Counter(result.id for result in gathered)
    problems = [
        f"{what} {_names(ids)}"
        for what, ids in (
            ("no verdict on", [i for i in expected if counts[i] == 0]),
            ("more than one verdict on", [i for i in expected if counts[i] > 1]),
            ("verdicts on samples of no prompt of this wave:", sorted(counts.keys() - set(expected))),
        )
        if ids
    ]
    if problems:
        raise RunFailure(f"rewards of batch {step} cannot be matched to its samples: " + "; ".join(problems))
    by_id = {result.id: result for result in gathered}
    rows = tuple(
        tuple(by_id[SampleId(step, prompt, member)] for member in range(group_size)) for prompt in prompts
    )
    return RewardTable(prompts=prompts, results=rows)


def reward_tensors(table: RewardTable) -> tuple[torch.Tensor, torch.Tensor]:
    """rewards (P, G) float64, nan where missing, and valid (P, G) bool; on the CPU."""
    valid = torch.tensor([[result.valid for result in row] for row in table.results])
    rewards = torch.tensor([[result.reward for result in row] for row in table.results], dtype=torch.float64)
    return torch.where(valid, rewards, torch.nan), valid


class RewardCensus:
    """All verdicts of one optimizer update: what is missing, and their statistics.

    expected: rollouts of one batch over all ranks.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._results: list[RewardResult] = []

    def add(self, table: RewardTable) -> None:
        """Count the verdicts of one wave."""
        self._results += [result for row in table.results for result in row]

    def check(self, max_error_rate: float, fail_on_error: str | None = None) -> None:
        """Raise RunFailure as soon as too many rewards of the batch are missing, whatever is to come.

        fail_on_error: the configuration key that allows none to be missing; None when it is off.
        """
        missing = [result for result in self._results if not result.valid]
        if not missing or (len(missing) <= max_error_rate * self._expected and fail_on_error is None):
            return
        reasons = Counter(_reason(result) for result in missing)
        listed = "; ".join(f"{reason} ({count}x)" for reason, count in reasons.most_common(3))
        allowed = math.floor(max_error_rate * self._expected)
        rule = f"reward_max_error_rate {max_error_rate:g} allows {allowed}"
        if fail_on_error is not None:
            rule = f"{fail_on_error} allows none"
        raise RunFailure(
            f"{len(missing)} of {self._expected} rewards of batch {missing[0].id.step} are missing, {rule}: "
            f"{listed}; first {_names([result.id for result in missing])}; see reward_errors.jsonl"
        )

    @classmethod
    def merged(cls, parts: Sequence[RewardCensus]) -> RewardCensus:
        """The census of several batches taken together."""
        merged = cls(sum(part._expected for part in parts))
        merged._results = [result for part in parts for result in part._results]
        return merged

    @property
    def valid_fraction(self) -> float:
        """Share of the verdicts that are valid."""
        return len(self._valid) / len(self._results)

    @property
    def mean(self) -> float:
        """Mean of the valid rewards; nan without any."""
        return _mean([result.reward for result in self._valid])

    @property
    def std(self) -> float:
        """Unbiased standard deviation of the valid rewards over all groups; 0 for fewer than two."""
        rewards = [result.reward for result in self._valid]
        if len(rewards) < 2:
            return 0.0
        mean = _mean(rewards)
        return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))

    @property
    def components(self) -> dict[str, float]:
        """Mean of each raw score over the valid verdicts that carry it as a finite number."""
        scores: dict[str, list[float]] = {}
        for result in self._valid:
            for name, score in result.components.items():
                if math.isfinite(score):
                    scores.setdefault(name, []).append(score)
        return {name: _mean(values) for name, values in sorted(scores.items())}

    @property
    def _valid(self) -> list[RewardResult]:
        return [result for result in self._results if result.valid]


def _reason(result: RewardResult) -> str:
    return result.error if result.error is not None else f"reward is not finite ({result.reward})"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _names(ids: Sequence[SampleId]) -> str:
    shown = ", ".join(f"(prompt {i.prompt}, member {i.member})" for i in ids[:4])
    return shown if len(ids) <= 4 else f"{shown} and {len(ids) - 4} more"
