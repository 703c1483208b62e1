"""The clipped policy-gradient surrogate and statistics of its ratio."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
