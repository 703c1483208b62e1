"""The clipped policy-gradient surrogate and statistics of its ratio."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol, cast

import torch

from wan_trainer.config.specs import Target
from wan_trainer.targets import construct, require, require_methods, user_code


class PolicyLoss(Protocol):
    """The policy loss of one replayed step."""

    def __call__(
        self, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_range: float
    ) -> torch.Tensor:
        """One term per sample, (N,) float32, differentiable in `new`; smaller is better, nothing is averaged.

        new, old: (N,) float32 log-probabilities, old without gradient. advantages: (N,) float32, 0 where a
        group teaches nothing. clip_range: the active one, of on-policy or of delayed rollouts. Terms of
        samples without a reward are dropped, and the sum is divided by a constant of the whole batch.
        """
        ...


def clipped_surrogate(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """max(-adv*ratio, -adv*clamp(ratio, 1-c, 1+c)) per sample with ratio = exp(new - old): (N,).

    new, old: (N,) log-probabilities, old without gradient. advantages: (N,). Nothing is averaged here: the
    caller divides by a constant of the whole batch, so that no sample's weight depends on its neighbours.
    Source: PPO (Schulman et al. 2017), equation 7, negated.
    """
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


@cache
def policy_loss(loss: Target | None) -> PolicyLoss:
    """The clipped surrogate for None, else the user's loss, called once in a process.

    Raises UserError when a target is not what `PolicyLoss` says.
    """
    if loss is None:
        return clipped_surrogate
    key = "grpo_loss"
    part = construct(key, loss)
    require_methods(key, loss, part, ["__call__"])
    chosen = cast("PolicyLoss", part)
    old, advantages = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([1.0, -1.0, 0.0])
    new = old.clone().requires_grad_()
    with user_code(key, loss):
        terms = chosen(new, old, advantages, 1e-3)
        shape, dtype, finite = tuple(terms.shape), terms.dtype, bool(terms.isfinite().all())
    require(key, loss, shape == (3,), f"returned shape {shape} for 3 samples: one term per sample")
    require(key, loss, dtype == torch.float32, f"returned {dtype}, not float32")
    require(key, loss, finite, "returned a term that is not finite where nothing has changed (new == old)")
    require(key, loss, terms.requires_grad, "returned terms without a gradient in the new log-probability")
    return chosen


class RatioStatistics(NamedTuple):
    """Sums over the valid samples of one replayed step, and one maximum over all: 0-d float64, on the device.

    deviation: largest |ratio - 1|; inf when a ratio is not finite: a maximum over ranks may lose a nan.
    kl: sum of the non-negative estimator ratio - 1 - log(ratio).
    """

    ratio: torch.Tensor
    clipped: torch.Tensor
    kl: torch.Tensor
    deviation: torch.Tensor


@torch.no_grad()
def ratio_statistics(
    new: torch.Tensor, old: torch.Tensor, valid: torch.Tensor, clip_range: float
) -> RatioStatistics:
    """Statistics of exp(new - old), all (N,), without synchronising with the host.

    In float64: a log-ratio of 1e-6 leaves nothing of ratio - 1 - log(ratio) in float32.
    """
    log_ratio = new.double() - old.double()
    deviation = torch.expm1(log_ratio)
    weight = valid.double()
    return RatioStatistics(
        ratio=((deviation + 1) * weight).sum(),
        clipped=((deviation.abs() > clip_range) * weight).sum(),
        kl=((deviation - log_ratio) * weight).sum(),
        deviation=deviation.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(),
    )
