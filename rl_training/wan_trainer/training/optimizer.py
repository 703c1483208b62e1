"""AdamW, its learning-rate schedule, and one guarded optimizer update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from wan_trainer.config.specs import OptimizerSpec
from wan_trainer.distributed.gradients import clip_gradients
from wan_trainer.training.ema import Ema
from wan_trainer.training.lr_schedule import learning_rate_schedule


class NonFiniteError(RuntimeError):
    """Loss or gradient were not finite for too many updates in a row."""


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer update: gradient norm before clipping, learning rate used, and whether it was skipped.

    A skipped update changed no weight.
    """

    grad_norm: float
    lr: float
    skipped: bool


def build_optimizer(parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over `parameters`. They are float32: bf16 weights swallow updates of lr 5e-6 whole.

    Weight decay applies to every parameter, norms and biases included, as in the reference recipes. On a GPU
    it is torch's fused kernel, which needs no memory besides its state and takes shards of any mixture of
    meshes; torch's own choice for shards is a loop over them.
    """
    trainable = list(parameters)
    assert trainable and all(parameter.requires_grad for parameter in trainable)
    assert all(parameter.dtype == torch.float32 for parameter in trainable)
    return torch.optim.AdamW(
        trainable,
        lr=spec.learning_rate,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True if trainable[0].is_cuda else None,
    )


class Updater:
    """Applies accumulated gradients: clip, refuse a non-finite gradient, AdamW step, next learning rate.

    horizon: optimizer updates of the whole run. `updates` counts applied and skipped updates alike: it is the
    position in the learning-rate schedule, so a resumed run needs no other scheduler state.
    sharded: the FSDP modules of the policy. sync_each_backward: reduce gradients over the ranks in every
    backward, which keeps them sharded; otherwise only in the last, which moves less data and holds full
    gradients. ema: counts the weights after every applied update.
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
        ema: Ema | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.updates = updates
        self._spec = spec
        self._horizon = horizon
        self._schedule = learning_rate_schedule(spec.lr_schedule, spec.warmup_steps)
        self._sharded = tuple(sharded)
        self._sync_each_backward = sync_each_backward
        self._ema = ema
        self._nonfinite_in_a_row = 0

    def set_gradient_sync(self, is_last: bool) -> None:
        """Called before each backward; is_last: no later backward of this rollout reaches the same expert.

        Gradients that are sharded at every backward still need only one sum over replicas, which are other
        machines: in the last.
        """
        for module in self._sharded:
            if self._sync_each_backward:
                module.set_requires_all_reduce(is_last)
            else:
                module.set_requires_gradient_sync(is_last)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, *, finite_loss: bool = True) -> UpdateResult:
        """Apply the gradients; skip this update when there are none at all or they are not finite.

        finite_loss: False skips it too, on every rank; a loss of one's own may hide that from its gradient.
        Raises NonFiniteError after `max_nonfinite_steps` skipped updates in a row.
        """
        spec = self._spec
        lr = spec.learning_rate * self._schedule(self.updates, self._horizon)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        # None at all when every replayed step was a frozen expert's, which holds on every rank or on none.
        reached = any(parameter.grad is not None for parameter in parameters)
        grad_norm = float(clip_gradients(parameters, spec.max_grad_norm).item()) if reached else 0.0
        # The norm is a global reduction, so every rank sees the same number and takes the same branch.
        finite = math.isfinite(grad_norm) and finite_loss
        applied = finite and reached
        if applied:
            self.optimizer.step()
            for module in self._sharded:
                # A forward without gradients leaves what is outside the blocks gathered until a backward of
                # the same expert. Where none follows before this update (a later batch of the window that
                # replays only the other expert), it would go on with the values from before.
                module.reshard()
            self._nonfinite_in_a_row = 0
            if self._ema is not None:
                self._ema.update()
        elif not finite:
            self._nonfinite_in_a_row += 1
        self.zero_grad()
        self.updates += 1
        if not finite and self._nonfinite_in_a_row >= spec.max_nonfinite_steps:
            raise NonFiniteError(
                f"update {self.updates}: loss or gradient (norm {grad_norm}) was not finite for "
                f"{self._nonfinite_in_a_row} updates in a row (max_nonfinite_steps): lower learning_rate or "
                "grpo_clip_range, or look at the last rewards"
            )
        return UpdateResult(grad_norm=grad_norm, lr=lr, skipped=not applied)
