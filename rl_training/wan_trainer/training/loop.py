"""The training loop: batches through the replay scheduler, with boundaries counted in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wan_trainer.training.scheduler import ReplayScheduler
from wan_trainer.types import PromptBatch, Rollout, StepRecord


@dataclass(frozen=True)
class Boundaries:
    """Where a run saves, drains and ends, in batches seen. save_steps 0 saves at the end only, eval_steps 0
    evaluates never.

    accumulation: batches per optimizer update; the run stops and saves only between updates.
    """

    total: int
    save_steps: int
    accumulation: int
    batch_size: int
    dataset_size: int
    eval_steps: int = 0

    def save_due(self, seen: int) -> bool:
        """A checkpoint is due once `seen` batches are trained."""
        return seen == self.total or (self.save_steps > 0 and seen % self.save_steps == 0)

    def evaluation_due(self, seen: int) -> bool:
        """The held prompts are evaluated once `seen` batches are drawn."""
        return self.eval_steps > 0 and (seen == self.total or seen % self.eval_steps == 0)

    def drain_due(self, seen: int) -> bool:
        """No rollout may stay pending across this point: a save, the end, or the end of an epoch."""
        epoch_before = (seen - 1) * self.batch_size // self.dataset_size
        epoch_after = seen * self.batch_size // self.dataset_size
        return self.save_due(seen) or epoch_after != epoch_before


def run_loop(
    batches: Iterable[PromptBatch],
    scheduler: ReplayScheduler[PromptBatch, Rollout, StepRecord],
    boundaries: Boundaries,
    *,
    record: Callable[[StepRecord], None],
    save: Callable[[int], None],
    stop_requested: Callable[[], bool],
    evaluate: Callable[[int], None] | None = None,
) -> bool:
    """Train on `batches` until they end; return False when an agreed stop ended the run early.

    A boundary drains the scheduler first, so a checkpoint never holds a pending rollout and the number of
    trained batches always equals the position that is saved. An evaluation drains nothing, which would change
    what is trained; it comes after a save, which does not wait for it, and not in a run that stops.
    """
    for batch in batches:
        for step_record in scheduler.push(batch, batch.step):
            record(step_record)
        seen = batch.step + 1
        stopping = stop_requested() and seen % boundaries.accumulation == 0 and seen < boundaries.total
        if stopping or boundaries.drain_due(seen):
            for step_record in scheduler.drain():
                record(step_record)
        if stopping or boundaries.save_due(seen):
            save(seen)
        if stopping:
            return False
        if evaluate is not None and boundaries.evaluation_due(seen):
            evaluate(seen)
    return True
