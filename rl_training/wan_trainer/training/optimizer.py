"""AdamW, its learning-rate schedule, and one guarded optimizer update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from wan_trainer.config.specs import OptimizerSpec
from wan_trainer.distributed.gradients import clip_gradients


class NonFiniteError(RuntimeError):
    """The gradient was not finite for too many updates in a row."""


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer update: gradient norm before clipping, learning rate used, and whether it was skipped."""

    grad_norm: float
    lr: float
    skipped: bool


def lr_factor(update: int, schedule: str, warmup: int, horizon: int) -> float:
    """The learning rate of update `update` (0 = the first) as a fraction of its peak.

    Warm-up rises linearly and reaches the peak after `warmup` updates. Then "cosine" falls to 0 at `horizon`,
    the number of updates of the whole run; "linear_warmup" stays at the peak. "constant" has no warm-up at
    all.
    """
    if schedule == "constant":
        return 1.0
    if update < warmup:
        return (update + 1) / warmup
    if schedule == "linear_warmup":
        return 1.0
    assert schedule == "cosine", schedule
    progress = min(1.0, (update - warmup) / max(1, horizon - warmup))
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over `parameters`. They are float32: bf16 weights swallow updates of lr 5e-6 whole.

    Weight decay applies to every parameter, norms and biases included, as in the reference recipes.
    """
    trainable = list(parameters)
    assert trainable and all(parameter.requires_grad for parameter in trainable)
    assert all(parameter.dtype == torch.float32 for parameter in trainable)
    return torch.optim.AdamW(
        trainable, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )


class Updater:
    """Applies accumulated gradients: clip, refuse a non-finite gradient, AdamW step, next learning rate.

    horizon: optimizer updates of the whole run. `updates` counts applied and skipped updates alike: it is the
    position in the learning-rate schedule, so a resumed run needs no other scheduler state.
    sharded: the FSDP modules of the policy. sync_each_backward: reduce gradients over the ranks in every
    backward, which keeps them sharded; otherwise only in the last, which moves less data and holds full
    gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        *,
        horizon: int,
        updates: int = 0,
        sharded: Sequence[FSDPModule] = (),
        sync_each_backward: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.updates = updates
        self._spec = spec
        self._horizon = horizon
        self._sharded = tuple(sharded)
        self._sync_each_backward = sync_each_backward
        self._nonfinite_in_a_row = 0

    def set_gradient_sync(self, is_last: bool) -> None:
        """Called before each backward; is_last: no later backward of this rollout reaches the same expert."""
        if self._sync_each_backward:
            return
        for module in self._sharded:
            module.set_requires_gradient_sync(is_last)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> UpdateResult:
        """Apply the gradients, or skip this update when they are not finite.

        Raises NonFiniteError after `max_nonfinite_steps` skipped updates in a row.
        """
        spec = self._spec
        lr = spec.learning_rate * lr_factor(self.updates, spec.lr_schedule, spec.warmup_steps, self._horizon)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        grad_norm = float(clip_gradients(parameters, spec.max_grad_norm).item())
        # The norm is a global reduction, so every rank sees the same number and takes the same branch.
        finite = math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
            self._nonfinite_in_a_row = 0
        else:
            self._nonfinite_in_a_row += 1
        self.zero_grad()
        self.updates += 1
        if self._nonfinite_in_a_row >= spec.max_nonfinite_steps:
            raise NonFiniteError(
                f"update {self.updates}: the gradient norm was {grad_norm} for {self._nonfinite_in_a_row} "
                "updates in a "
                "row (max_nonfinite_steps): lower learning_rate or grpo_clip_range, or look at the last "
                "rewards"
            )
        return UpdateResult(grad_norm=grad_norm, lr=lr, skipped=not finite)
