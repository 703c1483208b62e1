"""Group-relative advantages, robust to missing rewards."""

from __future__ import annotations

import torch

# Large against reward jitter: 1e-7 of it must not become an advantage near 1. Small against a real spread.
STD_EPSILON = 1e-4


def group_advantages(rewards: torch.Tensor, valid: torch.Tensor, clip_max: float) -> torch.Tensor:
    """(reward - mean) / (std + 1e-4) within each group, clamped to +-clip_max: (P, G) float32.

    rewards: (P, G), anything where invalid. valid: (P, G) bool; a non-finite reward is never valid. Mean and
    unbiased std are over the valid members, in float64. Invalid members, and all members of a `flat_groups`
    group, get exactly 0. Source: the outcome advantage of GRPO (DeepSeekMath), with validity.
    """
    present = valid & torch.isfinite(rewards)
    values = torch.where(present, rewards.double(), 0.0)
    count = present.sum(1, keepdim=True)
    mean = values.sum(1, keepdim=True) / count.clamp_min(1)
    centred = torch.where(present, values - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    advantages = (centred / (std + STD_EPSILON)).clamp(-clip_max, clip_max)
    flat = flat_groups(rewards, valid)[:, None]
    return torch.where(flat, 0.0, advantages).float()


def flat_groups(rewards: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """(P,) bool: groups without a preference, with fewer than 2 valid members or all valid rewards equal."""
    present = valid & torch.isfinite(rewards)
    high = torch.where(present, rewards, -torch.inf).amax(1)
    low = torch.where(present, rewards, torch.inf).amin(1)
    # Compared exactly: a mean of equal rewards is off by rounding, their maximum and minimum are not.
    return (present.sum(1) < 2) | (high == low)
