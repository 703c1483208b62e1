"""A policy loss: the clipped surrogate with a wider bound upwards, for rare good rollouts to gain weight."""

from __future__ import annotations

import torch


class ClipHigher:
    """max(-adv*ratio, -adv*clamp(ratio, 1 - c, 1 + widen*c)) with ratio = exp(new - old).

    Source: "Clip-Higher" of DAPO (Yu et al. 2025), with the upper range stated as a multiple of clip_range.
    """

    def __init__(self, widen: float) -> None:
        if widen < 1:
            raise ValueError(f"widen is {widen}; 1 is the clipped surrogate, more is wider")
        self.widen = widen

    def __call__(
        self, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_range: float
    ) -> torch.Tensor:
        """(N,) log-probabilities and advantages -> (N,) terms; the trainer sums and scales them."""
        ratio = torch.exp(new - old)
        clipped = ratio.clamp(1 - clip_range, 1 + self.widen * clip_range)
        return torch.maximum(-advantages * ratio, -advantages * clipped)
