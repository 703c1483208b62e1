"""What the training loop needs of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from wan_trainer.algorithms.protocols import (
    Communicator,
    Observer,
    PhaseClock,
    Policy,
    RolloutSource,
    Updater,
)
from wan_trainer.config.specs import GrpoSpec, SamplerSpec
from wan_trainer.sampling.sampler import Velocity
from wan_trainer.types import PromptBatch, StepRecord


class Algorithm[R](Protocol):
    """Turns batches into optimizer updates in two halves, so that a scheduler may delay the second one.

    R is what travels between the halves. Both are collectives: every rank calls them in the same order.
    """

    @property
    def policy_version(self) -> int:
        """Weight changes of the whole run so far; it goes into checkpoints and comes back in the parts."""
        ...

    def prepare(self, batch: PromptBatch, step: int) -> R:
        """Everything of batch `step` that needs no gradient."""
        ...

    def update(self, rollout: R) -> StepRecord | None:
        """Learn from a prepared batch; None while gradients accumulate over further batches."""
        ...


@dataclass(frozen=True)
class AlgorithmParts:
    """What a run gives its algorithm; the docstrings of the parts' protocols say how they behave.

    rollouts: draws this rank's share of a batch and starts scoring it. updater: clips and applies gradients,
    sets the learning rate. communicator: the data-parallel ranks; tensor-parallel peers hold the same
    rollouts and see the same rewards. clock, observer: timeline, reward log and sample videos. grpo,
    sampler: the resolved configuration. accumulation: batches per optimizer update. policy_version: where a
    resumed run stands. reference: the frozen policy of a KL term; None when `grpo.kl_coeff` is 0.
    """

    policy: Policy
    rollouts: RolloutSource
    updater: Updater
    communicator: Communicator
    clock: PhaseClock
    observer: Observer
    grpo: GrpoSpec
    sampler: SamplerSpec
    accumulation: int
    device: torch.device
    policy_version: int = 0
    reference: Velocity | None = None
