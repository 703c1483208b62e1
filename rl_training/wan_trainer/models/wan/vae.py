"""Pixels to normalised latents and back, exactly as Diffusers' Wan pipelines do it."""

from __future__ import annotations

import numpy as np
import torch

from wan_trainer.models.wan.load import WanComponents


def to_unit_range(frames: torch.Tensor) -> torch.Tensor:
    """uint8 RGB to float32 in [-1, 1]: the arithmetic of Diffusers' VideoProcessor at equal size."""
    assert frames.dtype == torch.uint8, frames.dtype
    return 2.0 * (frames.to(torch.float32) / 255.0) - 1.0


@torch.no_grad()
def encode(components: WanComponents, video: torch.Tensor) -> torch.Tensor:
    """Encode (3, F, H, W) float32 pixels in [-1, 1] to (z, f, h, w) float32 normalised latents.

    The distribution's mode, then `(latent - mean) / std` in float32. One video a call: a latent does not
    depend on what else the batch holds. The caller makes the VAE resident.
    """
    vae = components.vae
    latent = (
        vae.encode(video[None].to(components.device, vae.dtype), return_dict=False)[0]
        .mode()
        .to(torch.float32)
    )
    mean, inverse_std = _statistics(components, torch.float32)
    return ((latent - mean) * inverse_std)[0]


@torch.no_grad()
def decode(components: WanComponents, x0: torch.Tensor, batch_size: int) -> np.ndarray:
    """Decode (N, z, f, h, w) normalised latents to uint8 RGB (N, F, H, W, 3), `batch_size` videos a call.

    The VAE clamps to [-1, 1]; pixels are `round((x * 0.5 + 0.5) * 255)`, ties to even, as Diffusers'
    `numpy_to_pil`. (Its `export_to_video` truncates instead and is up to one level darker.) `x * 0.5 + 0.5`
    is in the VAE's dtype, the rest in float32.
    """
    vae = components.vae
    mean, inverse_std = _statistics(components, vae.dtype)
    videos: list[np.ndarray] = []
    with components.resident(vae):
        for chunk in x0.split(batch_size):
            latents = chunk.to(components.device, vae.dtype) / inverse_std + mean
            pixels = vae.decode(latents, return_dict=False)[0]
            unit = (pixels * 0.5 + 0.5).clamp(0, 1).to(torch.float32)
            videos.append((unit * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).cpu().numpy())
    return np.concatenate(videos)


def _statistics(components: WanComponents, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / std) of latents, (1, z, 1, 1, 1) each; the reciprocal is Diffusers' order of rounding."""
    config = components.vae.config
    mean = torch.tensor(config["latents_mean"]).view(1, -1, 1, 1, 1).to(components.device, dtype)
    std = torch.tensor(config["latents_std"]).view(1, -1, 1, 1, 1).to(components.device, dtype)
    return mean, 1.0 / std
