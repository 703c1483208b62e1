"""The progress of a run: a live bar on a terminal, one plain line every so often in a log."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from wan_trainer.types import EvaluationRecord, StepRecord


def format_duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 05 min, 3 d 04 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def describe(record: StepRecord) -> str:
    """The numbers one watches, on one line; the ratio's deviation with digits to tell it from zero.

    An algorithm without a ratio (nan) has a divergence from its reference there, if any.
    """
    policy = "on-policy" if record.policy_age == 0 else f"policy age {record.policy_age}"
    if math.isfinite(record.ratio_max_dev):
        of_policy = [
            f"ratio dev {record.ratio_max_dev:.2e} ({policy})",
            f"clip {100 * record.clip_fraction:.1f}%",
        ]
    else:
        of_policy = [f"KL loss {record.kl_loss:.3e}"] if record.kl_loss else []
    parts = [
        f"reward {record.reward_mean:.4f} ± {record.reward_std:.4f}",
        f"loss {record.policy_loss:+.3e}",
        *of_policy,
        f"grad {record.grad_norm:.3g}",
        f"lr {record.lr:.2e}",
    ]
    if record.reward_valid_fraction < 1:
        parts.insert(1, f"rewards valid {100 * record.reward_valid_fraction:.1f}%")
    if record.skipped:
        reached = not math.isfinite(record.grad_norm) or record.frozen_steps < record.replayed_steps
        why = "gradient not finite" if reached else "no replayed step reached a trained expert"
        parts.append(f"SKIPPED: {why}")
    return "  ".join(parts)


def describe_evaluation(record: EvaluationRecord) -> str:
    """The verdict on the held prompts, on one line; why some are missing, if they are."""
    parts = [
        f"evaluation after batch {record.batch}",
        f"reward {record.reward_mean:.4f} ± {record.reward_std:.4f}",
        f"{record.prompts} prompts",
        format_duration(record.seconds),
    ]
    if record.error is not None:
        missing = round((1 - record.reward_valid_fraction) * record.prompts)
        parts.append(f"{missing} rewards missing: {record.error}")
    return "  ".join(parts)


class ProgressDisplay:
    """Follows the batches of a run, from `start_batch` to `total_batches`.

    On a terminal the last update is shown beside a bar. Elsewhere one line is printed every `log_steps`
    batches, and for the first and the last one; 0 prints none.
    """

    def __init__(
        self, console: Console, *, total_batches: int, start_batch: int = 0, log_steps: int = 1
    ) -> None:
        self._console = console
        self._total = total_batches
        self._start = start_batch
        self._log_steps = log_steps
        self._began = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal and not console.quiet:
            self._bar = Progress(
                TextColumn("batch"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=console,
            )
            self._task = self._bar.add_task(
                "waiting for the first rollouts", total=total_batches, completed=start_batch
            )
            self._bar.start()

    def step(self, record: StepRecord) -> None:
        """One optimizer update was made."""
        done = record.batch + 1
        left = f"{format_duration(record.step_s)}/batch, {format_duration(self._remaining(done))} left"
        text = f"{describe(record)}  {left}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif self._is_due(done):
            self._console.print(f"{time.strftime('%H:%M:%S')} batch {done}/{self._total}  {text}")

    def evaluation(self, record: EvaluationRecord) -> None:
        """One line, above the bar where there is one."""
        text = f"{time.strftime('%H:%M:%S')} {describe_evaluation(record)}"
        self._console.print(text, markup=False, highlight=False)

    def close(self, exit_status: int) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _is_due(self, done: int) -> bool:
        if self._log_steps < 1:
            return False
        return done % self._log_steps == 0 or done in (self._start + 1, self._total)

    def _remaining(self, done: int) -> float:
        fresh = done - self._start
        elapsed = time.monotonic() - self._began
        return elapsed / fresh * (self._total - done) if fresh > 0 else math.nan
