"""Stochastic denoising steps: the distribution of x' given x, its log-probability and its divergence.

Notation: s = sigma, s' = sigma_next, dt = s' - s < 0, v = velocity, x_s = (1-s)*x0 + s*eps, hence
x0_hat = x - s*v and eps_hat = x + (1-s)*v. Everything is computed in the dtype of `x_t`, float32 in a run.

Sources: flow-CPS (coefficient-preserving sampling), DanceGRPO (the SDE of the rectified flow with a constant
diffusion coefficient), Flow-GRPO (the same SDE with the coefficient a*sqrt(s/(1-s))).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, Protocol, cast

import torch

from wan_trainer.config.specs import Target, TransitionChoice, TransitionKind
from wan_trainer.targets import construct, require, require_methods, user_code

Sigma = float | torch.Tensor


class Transition(NamedTuple):
    """The Gaussian of one step. mean: (N, C, F, H, W); std: (N, 1, 1, 1, 1), 0 where it is deterministic."""

    mean: torch.Tensor
    std: torch.Tensor


TransitionFunction = Callable[[torch.Tensor, torch.Tensor, Sigma, Sigma, torch.Tensor], Transition]


def flow_cps(
    x_t: torch.Tensor, velocity: torch.Tensor, sigma: Sigma, sigma_next: Sigma, eta: torch.Tensor
) -> Transition:
    """mean = (1-s')*x0_hat + sqrt(s'^2 - std^2)*eps_hat, std = s'*sin(eta*pi/2), eta in [0, 1], (N,).

    x' has noise level s' at every eta, so a rollout stays on the schedule the model was trained for. eta 0 is
    the Euler step x + dt*v. sqrt(s'^2 - std^2) is evaluated as s'*cos(eta*pi/2): no cancellation near eta 1.
    """
    angle = _per_sample(eta, x_t) * (math.pi / 2)
    x0_hat = x_t - sigma * velocity
    eps_hat = x_t + (1 - sigma) * velocity
    # cos(pi/2) is -4e-8 in float32: clamped, as a negative square root would be.
    kept = sigma_next * torch.cos(angle).clamp_min(0.0)
    return Transition(mean=(1 - sigma_next) * x0_hat + kept * eps_hat, std=sigma_next * torch.sin(angle))


def rf_sde(
    x_t: torch.Tensor, velocity: torch.Tensor, sigma: Sigma, sigma_next: Sigma, eta: torch.Tensor
) -> Transition:
    """mean = x + dt*v - 0.5*eta^2*score*dt, std = eta*sqrt(-dt), score = -(x - (1-s)*x0_hat)/s^2, eta (N,).

    The score equals -eps_hat/s, which is how it is evaluated: no division by a small s^2.
    """
    dt = sigma_next - sigma
    coefficient = _per_sample(eta, x_t)
    score = -(x_t + (1 - sigma) * velocity) / sigma
    mean = x_t + dt * velocity - (0.5 * dt) * coefficient.square() * score
    return Transition(mean=mean, std=coefficient * _sqrt(-dt))


def flow_grpo(
    x_t: torch.Tensor, velocity: torch.Tensor, sigma: Sigma, sigma_next: Sigma, eta: torch.Tensor
) -> Transition:
    """`rf_sde` with the diffusion coefficient g(s) = eta*sqrt(s/(1-s)), eta (N,).

    g has a pole at s = 1, the first step of a rollout: there s is replaced by s' = s_1.
    """
    level = _replace_one(sigma, sigma_next)
    return rf_sde(x_t, velocity, sigma, sigma_next, eta.to(x_t) * _sqrt(level / (1 - level)))


Density = Literal["gaussian", "surrogate"]


class TransitionRule(Protocol):
    """One stochastic denoising step and how its log-probability is taken (`log_prob`, `kl`).

    A pure function of its arguments: rollout, replay and the KL term evaluate it on the same values and must
    get the same bits, on every rank.
    """

    @property
    def density(self) -> Density:
        """gaussian: the mean log density under (mean, std); surrogate: -(x' - mean)^2, as flowcps has it."""
        ...

    def __call__(
        self, x_t: torch.Tensor, velocity: torch.Tensor, sigma: Sigma, sigma_next: Sigma, eta: torch.Tensor
    ) -> Transition:
        """x_t, velocity: (N, C, F, H, W) float32; 1 >= sigma > sigma_next >= 0, one for all; eta: (N,) > 0.

        The mean is differentiable in the velocity and, like std, float32. std: (N, 1, 1, 1, 1) or what
        broadcasts so, >= 0. At the last step, sigma_next 0, only the mean is used; all must be finite.
        """
        ...


@dataclass(frozen=True)
class _BuiltIn:
    step: TransitionFunction
    density: Density

    def __call__(
        self, x_t: torch.Tensor, velocity: torch.Tensor, sigma: Sigma, sigma_next: Sigma, eta: torch.Tensor
    ) -> Transition:
        return self.step(x_t, velocity, sigma, sigma_next, eta)


TRANSITIONS: Mapping[TransitionKind, TransitionRule] = {
    "flowcps": _BuiltIn(flow_cps, "surrogate"),
    "dancegrpo": _BuiltIn(rf_sde, "gaussian"),
    "flowgrpo": _BuiltIn(flow_grpo, "gaussian"),
}


@cache
def transition_rule(kind: TransitionChoice) -> TransitionRule:
    """The one lookup of rollout, replay and KL: a built-in rule, or the user's, called once in a process.

    Raises UserError when a target is not what `TransitionRule` says.
    """
    if not isinstance(kind, Target):
        return TRANSITIONS[kind]
    key = "grpo_sde_formula"
    part = construct(key, kind)
    require_methods(key, kind, part, ["__call__"])
    density = getattr(part, "density", None)
    require(key, kind, density in ("gaussian", "surrogate"), "needs density = 'gaussian' or 'surrogate'")
    rule = cast("TransitionRule", part)
    _try_out(rule, key, kind)
    return rule


def _try_out(rule: TransitionRule, key: str, target: Target) -> None:
    """Two samples through the first, a middle and the last step: shapes, dtypes, gradients, finite values."""
    generator = torch.Generator().manual_seed(0)
    x_t, velocity = torch.randn(2, 2, 3, 4, 2, 2, generator=generator)
    velocity.requires_grad_()
    for sigma, sigma_next in ((1.0, 0.9), (0.6, 0.5), (0.1, 0.0)):
        with user_code(key, target):
            step = rule(x_t, velocity, sigma, sigma_next, torch.tensor([0.3, 0.7]))
            mean, std = step.mean, step.std
            fits = mean.shape == x_t.shape and (x_t + std).shape == x_t.shape
        at = f"from sigma {sigma} to {sigma_next}"
        require(key, target, fits, f"has mean {tuple(mean.shape)}, std {tuple(std.shape)} {at}")
        single = mean.dtype == std.dtype == torch.float32
        require(key, target, single, f"computes in {mean.dtype} and {std.dtype}, not in float32")
        finite = bool(mean.isfinite().all() and std.isfinite().all() and (std >= 0).all())
        require(key, target, finite, f"has a mean or std that is not finite, or a negative std, {at}")
        require(key, target, mean.requires_grad, "has a mean without a gradient in the velocity")
        again = rule(x_t, velocity, sigma, sigma_next, torch.tensor([0.3, 0.7]))
        same = torch.equal(mean, again.mean) and torch.equal(std, again.std)
        require(key, target, same, "gives another mean or std when asked again; it may hold no state")


def log_prob(
    kind: TransitionChoice,
    x_next: torch.Tensor,
    transition: Transition,
    free_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probability of x' per sample, (N,): the mean over the free elements, never the sum.

    dancegrpo, flowgrpo (density "gaussian"): the Gaussian log density. flowcps ("surrogate"): the published
    surrogate -(x' - mean)^2, without 1/(2*std^2) and normaliser, so one clip range is looser late in the
    rollout than early.
    free_mask: bool, broadcastable to x_next; False elements (a pinned first frame) do not count.
    A Gaussian step of std 0 leaves the policy no choice: its log-probability is 0 by definition, never a nan.
    """
    squared = (x_next - transition.mean).square()
    if transition_rule(kind).density == "surrogate":
        return _free_mean(-squared, free_mask)
    std = transition.std
    safe = torch.where(std > 0, std, 1.0)
    density = -squared / (2 * safe.square()) - torch.log(safe) - 0.5 * math.log(2 * math.pi)
    return _free_mean(torch.where(std > 0, density, 0.0), free_mask)


def kl(
    kind: TransitionChoice,
    transition: Transition,
    reference: Transition,
    free_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Divergence from the reference policy's transition of the same step, (N,): mean over the free elements.

    dancegrpo, flowgrpo: (mu - mu_ref)^2 / (2*std^2); flowcps: (mu - mu_ref)^2, the scale of its surrogate.
    Both transitions have the same std. Gaussian steps of std 0 count as 0, as in `log_prob`.
    """
    squared = (transition.mean - reference.mean).square()
    if transition_rule(kind).density == "surrogate":
        return _free_mean(squared, free_mask)
    std = transition.std
    safe = torch.where(std > 0, std, 1.0)
    return _free_mean(torch.where(std > 0, squared / (2 * safe.square()), 0.0), free_mask)


def _free_mean(values: torch.Tensor, free_mask: torch.Tensor | None) -> torch.Tensor:
    """Mean over all but the first dim of the elements where `free_mask` is True, (N,)."""
    if free_mask is None:
        return values.flatten(1).mean(1)
    free = free_mask.expand_as(values)
    return torch.where(free, values, 0.0).flatten(1).sum(1) / free.flatten(1).sum(1)


def _per_sample(eta: torch.Tensor, x_t: torch.Tensor) -> torch.Tensor:
    """eta (N,) as (N, 1, ..., 1) in the dtype and on the device of x_t."""
    assert eta.shape == x_t.shape[:1], (eta.shape, x_t.shape)
    return eta.to(x_t).reshape(-1, *(1,) * (x_t.ndim - 1))


def _sqrt(value: Sigma) -> Sigma:
    return value.sqrt() if isinstance(value, torch.Tensor) else math.sqrt(value)


def _replace_one(sigma: Sigma, sigma_next: Sigma) -> Sigma:
    """sigma, or sigma_next where sigma is 1. A tensor stays on its device: no synchronisation."""
    if isinstance(sigma, torch.Tensor):
        return torch.where(sigma >= 1, torch.as_tensor(sigma_next).to(sigma), sigma)
    return sigma_next if sigma >= 1 else sigma
