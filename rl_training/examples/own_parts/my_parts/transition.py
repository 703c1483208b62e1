"""A transition: the rectified-flow SDE with a diffusion coefficient that fades with the noise level."""

from __future__ import annotations

from typing import Literal

import torch

from wan_trainer.sampling.transitions import Sigma, Transition, rf_sde


class FadingSde:
    """`rf_sde` with the coefficient g(s) = eta * s^power: most exploration where the layout is decided."""

    density: Literal["gaussian", "surrogate"] = "gaussian"

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def __call__(
        self, x_t: torch.Tensor, velocity: torch.Tensor, sigma: Sigma, sigma_next: Sigma, eta: torch.Tensor
    ) -> Transition:
        """(N, C, F, H, W) latent and velocity, eta (N,) -> mean and std of x'."""
        return rf_sde(x_t, velocity, sigma, sigma_next, eta * sigma**self.power)
