"""What the algorithms need from the rest of the trainer. Each part is an argument of their constructors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import numpy as np
import torch

from wan_trainer.types import Condition, PromptBatch, RewardRequest, RewardTable, Rollout, Sample


class Policy(Protocol):
    """The model that is trained."""

    def velocity(self, x_t: torch.Tensor, sigma: float, condition: Condition) -> torch.Tensor:
        """See `sampling.sampler.Velocity`."""
        ...

    def expert_for(self, sigma: float) -> str:
        """Name of the expert that predicts at `sigma`."""
        ...

    def trains_at(self, sigma: float) -> bool:
        """Whether the velocity at `sigma` depends on a trained parameter; the same on every rank."""
        ...

    def train(self) -> object:
        """Switch to training behaviour (activation checkpointing)."""
        ...

    def eval(self) -> object:
        """Switch to inference behaviour. Neither switch may change what `velocity` computes."""
        ...


class BranchPolicy(Policy, Protocol):
    """A policy whose branches of guidance can be had apart; latents keep their dtype."""

    def branch(
        self, x_t: torch.Tensor, sigma: float, condition: Condition, *, negative: bool = False
    ) -> torch.Tensor:
        """The velocity under the prompt, or under the `negative` prompt."""
        ...

    def branches(
        self, x_t: torch.Tensor, sigma: float, condition: Condition
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The conditional and the negative velocity, from one batched call."""
        ...


class BranchReference(Protocol):
    """The frozen policy that the divergence of ReFL is measured from. Called without gradients."""

    def branch(
        self, x_t: torch.Tensor, sigma: float, condition: Condition, *, negative: bool = False
    ) -> torch.Tensor:
        """See `BranchPolicy.branch`."""
        ...


class PixelDecoder(Protocol):
    """Decodes latents, with a gradient for them."""

    def __call__(self, x0: torch.Tensor) -> torch.Tensor:
        """(N, C, F, h, w) -> float32 (N, 3, frames, H, W) in [0, 1], without a graph."""
        ...

    def gradient[T](
        self, x0: torch.Tensor, objective: Callable[[torch.Tensor], tuple[torch.Tensor, T]]
    ) -> tuple[T, torch.Tensor]:
        """What `objective` returns beside its loss, and the gradient of that loss in `x0`.

        objective: takes the pixels and returns a scalar with a graph, and anything else.
        """
        ...


class Conditioner(Protocol):
    """Encodes prompts."""

    def __call__(self, samples: Sequence[Sample], first_frames: torch.Tensor | None) -> Condition:
        """One row a sample, on the training device. first_frames: uint8 (P, 3, H, W); None without images."""
        ...


class Decoder(Protocol):
    """Decodes latents."""

    def __call__(self, x0: torch.Tensor) -> np.ndarray:
        """(N, C, F, h, w) float32 -> uint8 (N, frames, H, W, 3) RGB on the CPU."""
        ...


class RolloutSource(Protocol):
    """Where rollouts come from: this process, or ranks of their own."""

    def collect(self, batch: PromptBatch, step: int, policy_version: int) -> Rollout:
        """Draw the rollouts of `batch` that belong to this rank and start scoring them."""
        ...


class UpdateResult(Protocol):
    """One optimizer update: gradient norm before clipping, learning rate, and whether it was skipped."""

    @property
    def grad_norm(self) -> float: ...

    @property
    def lr(self) -> float: ...

    @property
    def skipped(self) -> bool: ...


class Updater(Protocol):
    """Applies accumulated gradients."""

    @property
    def updates(self) -> int:
        """Optimizer updates done in the whole run, skipped ones included."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def set_gradient_sync(self, is_last: bool) -> None:
        """Called before each backward; is_last: no later backward of this rollout touches the same expert.

        Gradients must be reduced over the data-parallel ranks at the latest where is_last is True. It is told
        per expert because the last backward of a step reaches one expert only: the other's gradients would
        stay unreduced.
        """
        ...

    def step(self, *, finite_loss: bool = True) -> UpdateResult:
        """Clip and apply the gradients, or skip them where they or the loss are not finite; then drop them.

        finite_loss: the same on every rank.
        """
        ...


class Communicator(Protocol):
    """The data-parallel ranks, which hold different rollouts."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def dp_size(self) -> int: ...

    def gather_objects[T](self, value: T) -> list[T]:
        """The values of all data-parallel ranks, in rank order, on every rank."""
        ...

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> torch.Tensor:
        """A new tensor, the same on every rank."""
        ...


class Peers(Protocol):
    """The ranks that compute this rank's rollouts together with it: its tensor-parallel group."""

    @property
    def leads(self) -> bool:
        """True on the one rank of the group that conditions, decodes and has its rollouts scored."""
        ...

    def share(self, condition: Condition | None) -> Condition:
        """The leader's condition, on every rank of the group; the others pass None."""
        ...

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leader's values of a tensor that every rank of the group has, bit for bit."""
        ...


class PhaseClock(Protocol):
    """Times the phases of a step (`recording.clock.Clock`)."""

    def span(self, phase: str, step: int) -> AbstractContextManager[None]:
        """Time a block."""
        ...

    def add(self, phase: str, step: int, started: float, ended: float) -> None:
        """Record what another process of this machine did between two `time.monotonic()`."""
        ...


class Observer(Protocol):
    """Sees what passes by: writes rewards and sample videos."""

    def wants_videos(self, batch: PromptBatch) -> bool:
        """Whether `videos` keeps any of this batch."""
        ...

    def videos(self, batch: PromptBatch, videos: np.ndarray, requests: Sequence[RewardRequest]) -> None:
        """Rollouts of this rank, uint8 (N, frames, H, W, 3), one request a row. Must not keep them."""
        ...

    def rewards(self, batch: PromptBatch, table: RewardTable) -> None:
        """All rewards of one wave; called on every rank with the same table."""
        ...
