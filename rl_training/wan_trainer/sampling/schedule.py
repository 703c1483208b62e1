"""The sigma grid of a rollout, and which of its steps are replayed."""

from __future__ import annotations

import torch

from wan_trainer.sampling.noise import keyed_generator
from wan_trainer.topology import replay_step_count


def sigmas(num_steps: int, shift: float) -> torch.Tensor:
    """The grid s_0 = 1 > s_1 > ... > s_T = 0, (T+1,) float32 on the CPU.

    s_i = shift * t_i / (1 + (shift - 1) * t_i) with t_i = 1 - i/T: uniform times, shifted towards noise.
    """
    assert num_steps >= 1 and shift > 0, (num_steps, shift)
    times = 1.0 - torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    return (shift * times / (1.0 + (shift - 1.0) * times)).float()


def replay_steps(num_steps: int, ratio: float, seed: int, step: int) -> list[int]:
    """Denoising indices replayed for batch `step`, ascending; the same on every rank and for every member.

    max(1, int((T-1) * ratio)) of the first T-1 indices, without replacement. The last step is deterministic
    and never a candidate. Ranks that replayed different steps would route to different experts and
    deadlock in FSDP's collectives.
    """
    assert num_steps >= 2, "a one-step rollout has no stochastic step to replay"
    candidates = num_steps - 1
    count = replay_step_count(num_steps, ratio)
    chosen = keyed_generator(seed, "replay steps", step).permutation(candidates)[:count]
    return sorted(int(index) for index in chosen)
