"""The loss of a differentiable reward."""

from __future__ import annotations

import torch

from wan_trainer.config.specs import ReflSpec


def reward_loss(reward: torch.Tensor, spec: ReflSpec) -> torch.Tensor:
    """-weight * (reward - baseline) / scale of each sample, (N,); 0 where `reward` (N,) is not finite."""
    present = torch.isfinite(reward)
    filled = torch.where(present, reward, spec.baseline)
    return -spec.weight * (filled - spec.baseline) / spec.scale
