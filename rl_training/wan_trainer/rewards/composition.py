"""Several rewards as one: a weighted sum to train on, and rewards that are only logged."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from wan_trainer.types import (
    PendingRewards,
    Reward,
    RewardRequest,
    RewardResult,
    SampleId,
    UserError,
    first_line,
)

_log = logging.getLogger(__name__)

SCORE = "score"
"""Component that stands for a reward's own value where the reward names none."""

MISSING = "missing"
"""Component of a monitored reward: 1.0 for a rollout it gave no verdict on, else 0.0."""


@dataclass(frozen=True)
class NamedReward:
    """One reward of several. weight: None for one that is only logged. prefix: of its components."""

    name: str
    reward: Reward
    weight: float | None
    prefix: str


class ComposedReward:
    """`types.Reward` over several: reward = sum of weight x reward over those with a weight.

    A rollout without a verdict of one of these is missing; one without a verdict of a monitored reward is
    not. Every component is kept under its reward's prefix.
    """

    def __init__(self, parts: Sequence[NamedReward]) -> None:
        assert any(part.weight is not None for part in parts), parts
        self._parts = tuple(parts)

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingComposition:
        """Start all of them and return at once; see `types.Reward`."""
        pending = [(part, _submitted(part, videos, requests)) for part in self._parts]
        return PendingComposition(tuple(request.id for request in requests), tuple(pending))

    def close(self) -> None:
        """Close all of them, also when one fails to."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(closing(part.reward))


@dataclass(frozen=True)
class PendingComposition:
    """The verdicts of every part on one submission."""

    ids: tuple[SampleId, ...]
    parts: tuple[tuple[NamedReward, PendingRewards | None], ...]

    def result(self) -> list[RewardResult]:
        """Wait for all parts; see `types.PendingRewards`."""
        # Matched by identity: a part of the user's own may answer in another order.
        verdicts = [
            (part, {result.id: result for result in _answered(part, pending)}) for part, pending in self.parts
        ]
        return [_compose(id_, [(part, by_id.get(id_)) for part, by_id in verdicts]) for id_ in self.ids]


def _submitted(
    part: NamedReward, videos: np.ndarray, requests: Sequence[RewardRequest]
) -> PendingRewards | None:
    """None where a monitored reward fails: no run ends for what it is not trained on."""
    try:
        return part.reward.submit(videos, requests)
    except UserError:
        raise
    except Exception as error:
        if part.weight is not None:
            raise
        _log.warning("reward_monitor: %s takes no rollouts (%s)", part.name, first_line(error))
        return None


def _answered(part: NamedReward, pending: PendingRewards | None) -> list[RewardResult]:
    try:
        return [] if pending is None else pending.result()
    except Exception as error:
        if part.weight is not None:
            raise
        _log.warning("reward_monitor: %s gives no verdicts (%s)", part.name, first_line(error))
        return []


def _compose(id_: SampleId, verdicts: Sequence[tuple[NamedReward, RewardResult | None]]) -> RewardResult:
    components: dict[str, float] = {}
    terms: list[float] = []
    problems: list[str] = []
    for part, verdict in verdicts:
        given = verdict is not None and verdict.valid
        if part.weight is None:
            components[f"{part.prefix}{MISSING}"] = float(not given)
        if verdict is None or not given:
            if part.weight is not None:
                problems.append(f"{part.name}: {_why(verdict)}")
            continue
        components |= _prefixed(part.prefix, {SCORE: verdict.reward, **verdict.components})
        if part.weight is not None:
            terms.append(part.weight * verdict.reward)
    # Not fsum, which raises where finite terms have no finite sum.
    reward = math.nan if problems else sum(terms)
    if not problems and not math.isfinite(reward):
        problems.append(f"the weighted sum is not finite ({reward})")
    done = [verdict for _, verdict in verdicts if verdict is not None and verdict.ended > verdict.started]
    return RewardResult(
        id_,
        math.nan if problems else reward,
        components,
        "; ".join(problems) or None,
        started=min((verdict.started for verdict in done), default=0.0),
        ended=max((verdict.ended for verdict in done), default=0.0),
    )


def _why(verdict: RewardResult | None) -> str:
    if verdict is None:
        return "gave no verdict"
    return verdict.error or f"reward is not finite ({verdict.reward})"


def _prefixed(prefix: str, components: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in components.items()}
