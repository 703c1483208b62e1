"""Learning-rate schedules: built in, or the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol, cast

from wan_trainer.config.specs import LrSchedule, Target
from wan_trainer.targets import construct, require, require_methods, user_code
from wan_trainer.types import RunFailure


class LearningRateSchedule(Protocol):
    """The learning rate over a run."""

    def __call__(self, update: int, horizon: int) -> float:
        """The learning rate of update `update` (0 = the first) as a fraction of `learning_rate`, 0 or more.

        horizon: optimizer updates of the whole run. A pure function, the same on every rank: a resumed run
        goes on from the number of updates done and restores no other state.
        """
        ...


def warm(update: int, warmup: int) -> float | None:
    """Linear warm-up that reaches the peak after `warmup` updates; None from then on."""
    return (update + 1) / warmup if update < warmup else None


def cosine(warmup: int) -> LearningRateSchedule:
    """Warm-up, then half a cosine to 0 at the horizon."""

    def factor(update: int, horizon: int) -> float:
        rising = warm(update, warmup)
        if rising is not None:
            return rising
        progress = min(1.0, (update - warmup) / max(1, horizon - warmup))
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def linear_warmup(warmup: int) -> LearningRateSchedule:
    """Warm-up, then constant."""

    def factor(update: int, horizon: int) -> float:
        rising = warm(update, warmup)
        return 1.0 if rising is None else rising

    return factor


def constant(warmup: int) -> LearningRateSchedule:
    """No warm-up at all."""
    return lambda update, horizon: 1.0


SCHEDULES: Mapping[LrSchedule, Callable[[int], LearningRateSchedule]] = {
    "cosine": cosine,
    "linear_warmup": linear_warmup,
    "constant": constant,
}


@cache
def learning_rate_schedule(schedule: LrSchedule | Target, warmup: int) -> LearningRateSchedule:
    """The schedule of that name, or the user's (called once in a process): the whole factor, with warm-up.

    Raises UserError when a target is not what `LearningRateSchedule` says.
    """
    if not isinstance(schedule, Target):
        return SCHEDULES[schedule](warmup)
    key = "lr_scheduler"
    part = construct(key, schedule)
    require_methods(key, schedule, part, ["__call__"])
    own = cast("LearningRateSchedule", part)
    for update, horizon in ((0, 1), (0, 10), (5, 10), (9, 10)):
        with user_code(key, schedule):
            factor = own(update, horizon)
        rule = f"returned {factor!r} for update {update} of {horizon}, not a number of 0 or more"
        require(key, schedule, _is_factor(factor), rule)

    def guarded(update: int, horizon: int) -> float:
        factor = own(update, horizon)
        if not _is_factor(factor):
            raise RunFailure(
                f"{key}: {schedule.path} returned {factor!r} for update {update} of {horizon}, not a number "
                "of 0 or more; nothing was changed by that update"
            )
        return factor

    return guarded


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
