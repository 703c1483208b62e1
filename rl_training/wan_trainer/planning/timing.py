"""Step time with and without delay, from the times of the phases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from wan_trainer.recording.jsonl import JsonObject, RowReader
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.types import UserError

PHASES = ("rollout", "reward", "replay")
_EXAMPLE = "--phase_times rollout=40,reward=35,replay=60"
# A delayed run that waits less than this share of its step for rewards hides how long they take.
_VISIBLE = 0.01


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of one step. rollout: sampling and decoding all waves. reward: scoring all of them, one after
    the other. replay: all forwards, backwards and updates."""

    rollout: float
    reward: float
    replay: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds a step takes on-policy and delayed, and how much faster the second is."""

    phases: PhaseTimes
    synchronous: float
    delayed: float

    @property
    def speedup(self) -> float:
        """synchronous / delayed."""
        return self.synchronous / self.delayed


def estimate_steps(phases: PhaseTimes, waves: int) -> StepTimes:
    """Step times of `waves` equal waves.

    On-policy, a wave is scored while later ones are sampled, and replayed while later ones are scored. With a
    delay of one step or more, scoring runs beside sampling and replay, and the slower of both sets the pace.
    """
    scored, replayed = 0.0, phases.rollout
    for wave in range(1, waves + 1):
        scored = max(scored, phases.rollout * wave / waves) + phases.reward / waves
        replayed = max(replayed, scored) + phases.replay / waves
    delayed = max(phases.reward, phases.rollout + phases.replay)
    return StepTimes(phases=phases, synchronous=replayed, delayed=delayed)


def parse_phase_times(text: str) -> PhaseTimes:
    """`rollout=40,reward=35,replay=60`, seconds. Raises UserError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in PHASES or name in values:
            raise UserError(
                f"--phase_times: '{part}' is not one of {', '.join(PHASES)}, each once; use {_EXAMPLE}"
            )
        try:
            values[name] = float(number)
        except ValueError:
            values[name] = math.nan
        if not (math.isfinite(values[name]) and values[name] >= 0):
            raise UserError(f"--phase_times: '{part}' is not a number of seconds; use {_EXAMPLE}")
    missing = [name for name in PHASES if name not in values]
    if missing:
        raise UserError(f"--phase_times: {', '.join(missing)} is missing; use {_EXAMPLE}")
    if values["rollout"] + values["replay"] + values["reward"] == 0:
        raise UserError(f"--phase_times: all phases take 0 s; use {_EXAMPLE}")
    return PhaseTimes(**values)


def measured_phase_times(run_dir: Path) -> PhaseTimes:
    """Medians over the updates of a finished or running run, the first one left out: it warms caches.

    An on-policy run shows as its waiting time what scoring adds to the step. In a delayed run a wait is what
    exceeds rollout and replay; without one, scoring is hidden. Raises UserError when the directory has no
    such times.
    """
    rows = list(RowReader(RunFiles(run_dir).metrics))
    if not rows:
        raise UserError(f"--from_run: {run_dir} has no metrics.jsonl with updates; give {_EXAMPLE} instead")
    rows = rows[1:] or rows
    rollout, wait, replay = (
        _median(rows, key, run_dir) for key in ("prepare_s", "reward_wait_s", "replay_s")
    )
    if rollout + replay == 0:
        raise UserError(f"--from_run: metrics.jsonl of {run_dir} says that a step takes 0 s; give {_EXAMPLE}")
    if not any(row.get("policy_age") for row in rows):
        return PhaseTimes(rollout=rollout, reward=wait, replay=replay)
    if wait < _VISIBLE * (rollout + replay):
        raise UserError(
            f"--from_run: {run_dir} is a delayed run that never waits for rewards, so that it does not show "
            f"how long they take; use an on-policy run, or --phase_times rollout={rollout:.3g},reward=S,"
            f"replay={replay:.3g}"
        )
    return PhaseTimes(rollout=rollout, reward=rollout + replay + wait, replay=replay)


def _median(rows: Sequence[JsonObject], key: str, run_dir: Path) -> float:
    values = [float(value) for row in rows if isinstance(value := row.get(key), int | float) and _sane(value)]
    if not values:
        raise UserError(f"--from_run: metrics.jsonl of {run_dir} has no {key}; give {_EXAMPLE} instead")
    return median(values)


def _sane(seconds: float) -> bool:
    """Not of a damaged row: comparisons with nan are false, and no step takes as long as the age of the
    Earth."""
    return 0 <= seconds < 1e17
