"""The only denoising loop, and the replay of one of its steps.

Rollout and replay evaluate a step with the same function on the same bits, so an unchanged policy replays
with ratio exactly 1. The caller decides about gradients: a rollout for GRPO runs under `torch.no_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from wan_trainer.config.specs import SamplerSpec, TransitionChoice
from wan_trainer.sampling.dtypes import DTYPES
from wan_trainer.sampling.noise import group_eta, initial_noise, step_noise
from wan_trainer.sampling.transitions import Transition, log_prob, transition_rule
from wan_trainer.types import Condition, SampleId, StoredStep, Trajectory


class Velocity(Protocol):
    """The model: x_t (N, C, F, H, W) float32 and one sigma for all N -> velocity (N, C, F, H, W) float32."""

    def __call__(self, x_t: torch.Tensor, sigma: float, condition: Condition) -> torch.Tensor: ...


def sample(
    velocity: Velocity,
    condition: Condition,
    ids: Sequence[SampleId],
    spec: SamplerSpec,
    grid: torch.Tensor,
    keep: Sequence[int],
    shape: Sequence[int],
    device: torch.device | str,
) -> Trajectory:
    """Denoise the N samples `ids` from pure noise and keep what replaying the steps `keep` needs.

    grid: (T+1,) sigmas from `schedule.sigmas`. keep: indices below T-1. shape: (C, F, H, W) of one latent.
    Every latent is rounded to the trajectory dtype before its log-probability is computed, and the next step
    starts from the rounded value: the log-probability belongs to the latent that is stored.
    """
    levels = [float(level) for level in grid]
    last = len(levels) - 2
    assert last + 1 == spec.num_steps, (last + 1, spec.num_steps)
    assert all(0 <= index < last for index in keep), (
        keep,
        "the last step is deterministic and never replayed",
    )
    dtype = DTYPES[spec.trajectory_dtype]
    transition_of = transition_rule(spec.kind)
    mask = free_mask(condition, shape, device)
    eta = group_eta(spec.seed, ids, spec.eta, spec.eta_range).to(device)
    kept = frozenset(keep)

    latents: dict[int, torch.Tensor] = {}
    steps: list[StoredStep] = []
    stored = initial_noise(spec.seed, ids, shape, spec.share_group_init_noise).to(device).to(dtype)
    for index, (sigma, sigma_next) in enumerate(pairwise(levels[:-1])):
        x_t = pin(stored, condition)
        step = transition_of(x_t, velocity(x_t, sigma, condition), sigma, sigma_next, eta)
        noise = step_noise(spec.seed, ids, index, shape).to(device)
        stored_next = (step.mean + step.std * noise).to(dtype)
        if index in kept:
            old = log_prob(spec.kind, pin(stored_next, condition), step, mask)
            steps.append(StoredStep(index=index, sigma=sigma, sigma_next=sigma_next, old_log_prob=old))
            latents[index], latents[index + 1] = stored, stored_next
        stored = stored_next

    # The final step is the mean without noise; it is decoded, not replayed, hence never rounded.
    x_t = pin(stored, condition)
    final = transition_of(x_t, velocity(x_t, levels[-2], condition), levels[-2], levels[-1], eta)
    return Trajectory(
        ids=tuple(ids), latents=latents, steps=tuple(steps), eta=eta, x0=pin(final.mean, condition)
    )


def replay_transition(
    velocity: Velocity, condition: Condition, trajectory: Trajectory, step: StoredStep, kind: TransitionChoice
) -> Transition:
    """The transition of a stored step under the current `velocity`; x_t, sigmas and eta are the rollout's."""
    x_t = pin(trajectory.latents[step.index], condition)
    predicted = velocity(x_t, step.sigma, condition)
    return transition_rule(kind)(x_t, predicted, step.sigma, step.sigma_next, trajectory.eta)


def stored_log_prob(
    condition: Condition,
    trajectory: Trajectory,
    step: StoredStep,
    kind: TransitionChoice,
    transition: Transition,
) -> torch.Tensor:
    """Log-probability of the stored x' under `transition`, (N,)."""
    x_next = trajectory.latents[step.index + 1]
    mask = free_mask(condition, x_next.shape[1:], x_next.device)
    return log_prob(kind, pin(x_next, condition), transition, mask)


def replay_log_prob(
    velocity: Velocity, condition: Condition, trajectory: Trajectory, step: StoredStep, kind: TransitionChoice
) -> torch.Tensor:
    """Log-probability of a stored step under the current `velocity`, (N,)."""
    transition = replay_transition(velocity, condition, trajectory, step, kind)
    return stored_log_prob(condition, trajectory, step, kind, transition)


def pin(latent: torch.Tensor, condition: Condition) -> torch.Tensor:
    """`latent` (N, C, F, H, W) in float32, its first frame replaced by the condition's, if there is one.

    Pinning follows rounding, so the pinned frame is exact in rollout and replay whatever the storage dtype.
    """
    latent = latent.float()
    first = condition.first_frame_latent
    return latent if first is None else torch.cat([first.to(latent), latent[:, :, 1:]], dim=2)


def free_mask(condition: Condition, shape: Sequence[int], device: torch.device | str) -> torch.Tensor | None:
    """(1, 1, F, 1, 1) bool, False for the pinned first frame; None when every element is free."""
    if condition.first_frame_latent is None:
        return None
    mask = torch.ones((1, 1, shape[1], 1, 1), dtype=torch.bool, device=device)
    mask[:, :, 0] = False
    return mask
