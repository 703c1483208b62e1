"""Rewards whose gradient reaches the pixels: built, and held to their interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from wan_trainer.config.specs import Target
from wan_trainer.targets import construct, require_methods, user_code
from wan_trainer.types import (
    DifferentiableReward,
    DifferentiableScores,
    RewardContext,
    Sample,
    UserError,
)


@dataclass(frozen=True)
class CheckedReward:
    """A reward held to its interface: what would train on nothing is one line that names its key."""

    key: str
    target: Target
    reward: DifferentiableReward

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """See `types.DifferentiableReward`; float32 whatever the reward computes in, float64 stays."""
        with user_code(self.key, self.target, "score"):
            scores: object = self.reward.score(videos, samples)
        if not isinstance(scores, DifferentiableScores):
            raise UserError(
                f"{self.key}: score returned {type(scores).__name__}; return types.DifferentiableScores"
            )
        shape = (videos.shape[0],)
        for name, values in (("reward", scores.reward), *scores.components.items()):
            given: object = values
            if not isinstance(given, torch.Tensor):
                raise UserError(
                    f"{self.key}: {name} is {type(given).__name__}; return a tensor of one number a video"
                )
            if tuple(values.shape) != shape:
                raise UserError(
                    f"{self.key}: {name} has shape {tuple(values.shape)}, and {shape[0]} videos were scored; "
                    "return one number a video"
                )
        needed = videos.requires_grad and torch.is_grad_enabled()
        if needed and not scores.reward.requires_grad:
            raise UserError(
                f"{self.key}: the reward has no graph to the pixels, so that nothing would be learned; "
                "compute it from the videos without no_grad or detach"
            )
        wide = torch.promote_types(scores.reward.dtype, torch.float32)
        components = {name: values.detach().float() for name, values in scores.components.items()}
        return DifferentiableScores(scores.reward.to(wide), components)


def build_differentiable(key: str, target: Target, context: RewardContext) -> DifferentiableReward:
    """The reward that `target` returns for `context` and its configuration.

    key: the configuration key that names it. Raises UserError when it cannot be used.
    """
    reward = construct(key, target, context)
    require_methods(key, target, reward, ["score"])
    return CheckedReward(key, target, cast("DifferentiableReward", reward))
