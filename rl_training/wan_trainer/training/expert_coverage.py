"""Whether every expert that is trained also gets replayed steps: otherwise it silently learns nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from wan_trainer.models.wan.policy import WanPolicy
from wan_trainer.types import UserError

_NOISE = {"transformer": "high-noise", "transformer_2": "low-noise"}


def learning_experts(policy: WanPolicy) -> list[str]:
    """Experts that hold a trained parameter."""
    return [
        name
        for name, expert in policy.experts.items()
        if any(parameter.requires_grad for parameter in expert.parameters())
    ]


def unreachable_experts(policy: WanPolicy, grid: torch.Tensor) -> list[str]:
    """Trained experts that no replayable step is routed to. grid: (T+1,) sigmas; the last is no such step."""
    reached = {policy.expert_for(float(sigma)) for sigma in grid[:-2]}
    return [name for name in learning_experts(policy) if name not in reached]


def check_reach(policy: WanPolicy, grid: torch.Tensor) -> None:
    """Raise UserError when no replayable step of the sigma grid is routed to any expert that is trained."""
    trained = learning_experts(policy)
    if unreachable_experts(policy, grid) != trained:
        return
    names = " and ".join(f"{name} ({_NOISE[name]})" for name in trained)
    lowest, highest = float(grid[-3]), float(grid[0])
    raise UserError(
        f"grpo_num_sampling_steps: {len(grid) - 1} steps can be replayed at sigmas {lowest:.3f} to "
        f"{highest:.3f}, and none is routed to {names}, all that is trained; "
        "raise grpo_num_sampling_steps, lower flow_shift, or train the other expert"
    )


class ExpertCoverage:
    """Counts the replayed steps of every trained expert, and warns of one that an epoch left without any.

    An epoch is judged from where this start of the run joined it.
    """

    def __init__(self, trained: Sequence[str]) -> None:
        self._trained = trained
        self._epoch: int | None = None
        self._counts: dict[str, int] = {}

    def add(self, epoch: int, replayed_per_expert: Mapping[str, int]) -> list[str]:
        """Count one update; the warnings of the epoch before when this is the first of another."""
        lines: list[str] = []
        if self._epoch is not None and epoch != self._epoch:
            lines = self._warnings()
            self._counts = {}
        self._epoch = epoch
        for name, count in replayed_per_expert.items():
            self._counts[name] = self._counts.get(name, 0) + count
        return lines

    def close(self) -> list[str]:
        """The warnings of the last epoch, whole or as far as the run went."""
        return [] if self._epoch is None else self._warnings()

    def _warnings(self) -> list[str]:
        total = sum(self._counts.values())
        return [
            f"warning: none of the {total} steps replayed in epoch {self._epoch} is one of {name} "
            f"({_NOISE[name]}), which is trained: it has learnt nothing from it. Raise "
            "dancegrpo_timestep_selection_ratio or grpo_num_sampling_steps, or leave it out of train_experts"
            for name in self._trained
            if not self._counts.get(name)
        ]
