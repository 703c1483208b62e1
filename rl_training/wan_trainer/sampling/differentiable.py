"""Deterministic sampling with a gradient through some of its steps.

Euler steps x' = x + (sigma' - sigma) * v of the probability-flow ODE. The latents in front of the steps with
a gradient are kept; the backward pass then takes the steps one by one from the last to the first, evaluates
each again and hands the gradient of its result on to its input. That is reverse-mode differentiation with a
checkpoint at every step, without holding two steps at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch

from wan_trainer.config.specs import ReflAlgorithm
from wan_trainer.sampling.noise import keyed_generator
from wan_trainer.types import Condition


class Branches(Protocol):
    """The model, one branch of guidance at a time (`models.wan.policy.WanPolicy`)."""

    def branch(
        self, x_t: torch.Tensor, sigma: float, condition: Condition, *, negative: bool = False
    ) -> torch.Tensor: ...

    def branches(
        self, x_t: torch.Tensor, sigma: float, condition: Condition
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class Guidance:
    """v = v_u + scale * (v_c - v_u); gradient: whether the unconditional branch v_u has one too."""

    scale: float = 1.0
    gradient: Literal["conditional", "both"] = "conditional"


@dataclass(frozen=True)
class GradPlan:
    """The denoising steps of one batch that have a gradient, in denoising order.

    through: the gradient of a step also reaches its input through the velocity, not by the straight path
    alone. jump: sampling ends at the step, with its own estimate x - sigma * v of the clean latent.
    """

    steps: tuple[int, ...]
    through: bool = True
    jump: bool = False


def grad_plan(kind: ReflAlgorithm, first: int, last: int, seed: int, step: int) -> GradPlan:
    """The steps of batch `step`, out of the window first..last; a draw is keyed by seed and batch alone.

    last_step: DRaFT-1, `last` alone. truncated: all of the window (DRaFT-K). random_k: its last K, K uniform
    from 1 to its length (AlignProp). x0_jump: one of them, uniform, and a jump to x0 (ReFL). drtune: all of
    the window, with the input of the velocity detached (DRTune).
    """
    assert 0 <= first <= last, (first, last)
    window = tuple(range(first, last + 1))
    drawn = int(keyed_generator(seed, "refl steps", step).random() * len(window))
    if kind == "last_step":
        return GradPlan(window[-1:])
    if kind == "random_k":
        return GradPlan(window[-(drawn + 1) :])
    if kind == "x0_jump":
        return GradPlan(window[drawn : drawn + 1], jump=True)
    return GradPlan(window, through=kind != "drtune")


@dataclass(frozen=True)
class Sampled:
    """N clean latents x0 (N, C, F, h, w), and the latent in front of each step with a gradient."""

    x0: torch.Tensor
    latents: Mapping[int, torch.Tensor]


@torch.no_grad()
def draw(
    model: Branches,
    condition: Condition,
    noise: torch.Tensor,
    grid: Sequence[float],
    plan: GradPlan,
    guidance: Guidance,
) -> Sampled:
    """Denoise `noise` (N, C, F, h, w) along the sigmas `grid`, T + 1 of them down to 0, without a graph."""
    x = pinned(noise, condition)
    latents: dict[int, torch.Tensor] = {}
    for index, (sigma, sigma_next) in enumerate(pairwise(grid)):
        if index in plan.steps:
            latents[index] = x
        jumps = plan.jump and index in plan.steps
        velocity, _ = guided(model, x, sigma, condition, guidance)
        x = euler(x, velocity, sigma, 0.0 if jumps else sigma_next, condition)
        if jumps:
            break
    return Sampled(x, latents)


def guided(
    model: Branches, x_t: torch.Tensor, sigma: float, condition: Condition, guidance: Guidance
) -> tuple[torch.Tensor, torch.Tensor]:
    """The guided and the conditional velocity. Drawing and differentiating call it alike, bit for bit."""
    if guidance.scale <= 1:
        conditional = model.branch(x_t, sigma, condition)
        return conditional, conditional
    if guidance.gradient == "both":
        conditional, negative = model.branches(x_t, sigma, condition)
    else:
        with torch.no_grad():
            negative = model.branch(x_t.detach(), sigma, condition, negative=True)
        conditional = model.branch(x_t, sigma, condition)
    return negative + guidance.scale * (conditional - negative), conditional


def euler(
    x: torch.Tensor, velocity: torch.Tensor, sigma: float, sigma_next: float, condition: Condition
) -> torch.Tensor:
    """The latent at `sigma_next`; at 0 it is the step's estimate of the clean latent."""
    return pinned(x + (sigma_next - sigma) * velocity, condition)


def pinned(latent: torch.Tensor, condition: Condition) -> torch.Tensor:
    """`latent` with its first frame replaced by the condition's, if there is one; its dtype is kept."""
    first = condition.first_frame_latent
    return latent if first is None else torch.cat([first.to(latent), latent[:, :, 1:]], dim=2)


def step_backward(
    model: Branches,
    condition: Condition,
    x_t: torch.Tensor,
    sigma: float,
    sigma_next: float,
    gradient: torch.Tensor,
    guidance: Guidance,
    *,
    through: bool,
    needs_input: bool,
    reference: torch.Tensor | None = None,
    kl_scale: float = 0.0,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Backward through one step: parameter gradients accumulate, and the gradient of its input is returned.

    gradient: of the loss in the step's result. needs_input: whether an earlier step asks for that of x_t.
    reference: the frozen conditional velocity at x_t; kl_scale times the summed divergence joins the loss.
    Returns the gradient of x_t (None unless needed) and the divergences (N,), detached.
    """
    leaf = x_t.detach().requires_grad_(through and needs_input)
    with torch.enable_grad():
        velocity, conditional = guided(model, leaf, sigma, condition, guidance)
        result = euler(leaf, velocity, sigma, sigma_next, condition)
        divergence = leaf.new_zeros(leaf.shape[0])
        if reference is not None:
            divergence = velocity_divergence(conditional, reference, sigma, condition)
        torch.autograd.backward(
            [result, divergence.sum()] if reference is not None else [result],
            [gradient, divergence.new_tensor(kl_scale)] if reference is not None else [gradient],
        )
    if not needs_input:
        return None, divergence.detach()
    if through:
        assert leaf.grad is not None
        return leaf.grad, divergence.detach()
    return straight(gradient, condition), divergence.detach()


def straight(gradient: torch.Tensor, condition: Condition) -> torch.Tensor:
    """The gradient of x_t by x' = x_t + c alone: that of x', and 0 where the first frame is given."""
    if condition.first_frame_latent is None:
        return gradient
    return torch.cat([torch.zeros_like(gradient[:, :, :1]), gradient[:, :, 1:]], dim=2)


def velocity_divergence(
    velocity: torch.Tensor, reference: torch.Tensor, sigma: float, condition: Condition
) -> torch.Tensor:
    """mean((v - v_ref)^2) / (2 sigma^2) of each sample, (N,), over what is free: not a given first frame."""
    squared = (velocity - reference).square()
    if condition.first_frame_latent is not None:
        squared = squared[:, :, 1:]
    return squared.flatten(1).mean(dim=1) / (2 * sigma**2)
