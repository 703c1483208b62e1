"""What the training loop needs of an algorithm."""

from __future__ import annotations

from typing import Protocol

from wan_trainer.types import PromptBatch, StepRecord


class RunFailure(RuntimeError):
    """The run cannot go on, and why in words for its user. Raised on every rank at the same place."""


class Algorithm[R](Protocol):
    """Turns batches into optimizer updates in two halves, so that a scheduler may delay the second one.

    R is what travels between the halves. Both are collectives: every rank calls them in the same order.
    """

    def prepare(self, batch: PromptBatch, step: int) -> R:
        """Everything of batch `step` that needs no gradient."""
        ...

    def update(self, rollout: R) -> StepRecord | None:
        """Learn from a prepared batch; None while gradients accumulate over further batches."""
        ...
