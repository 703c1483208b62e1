"""A differentiable reward without a model: the quickstart trains on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wan_trainer.types import DifferentiableScores, RewardContext, Sample, UserError


class Colour:
    """1 minus the mean distance of a video's pixels from one colour, between 0 and 1.

    colour: RGB, each in [0, 1].
    """

    def __init__(self, context: RewardContext, *, colour: Sequence[float] = (1.0, 0.0, 0.0)) -> None:
        if len(colour) != 3 or not all(0 <= float(part) <= 1 for part in colour):
            raise UserError(f"colour: {list(colour)} is no RGB colour; use three numbers from 0 to 1")
        self._colour = torch.tensor([float(part) for part in colour], device=context.device)

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """See `types.DifferentiableReward`."""
        assert len(samples) == videos.shape[0], (len(samples), videos.shape)
        distance = (videos - self._colour.to(videos).view(1, 3, 1, 1, 1)).abs()
        by_channel = 1 - distance.flatten(2).mean(dim=2)
        names = ("red", "green", "blue")
        return DifferentiableScores(
            reward=by_channel.mean(dim=1),
            components={name: by_channel[:, channel].detach() for channel, name in enumerate(names)},
        )
