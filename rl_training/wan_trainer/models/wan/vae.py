"""Pixels to normalised latents and back, exactly as Diffusers' Wan pipelines do it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from wan_trainer.config.specs import VaeTiling
from wan_trainer.models.wan.load import WanComponents
from wan_trainer.models.wan.vae_backward import Objective, result_and_gradient
from wan_trainer.models.wan.vae_decoder import decode_frames, decode_videos
from wan_trainer.models.wan.vae_tiles import TileGrid, at_least_float32, decode_tiled, tile_grid


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


def decode_differentiable(
    components: WanComponents,
    x0: torch.Tensor,
    tiling: VaeTiling | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Decode (N, z, f, h, w) normalised latents to float32 pixels (N, 3, F, H, W) in [0, 1] with a gradient.

    The pixels of `decode` before they are rounded; the VAE's parameters get no gradient. Without autograd it
    is `decode` in float32, one video a call. tiling None: exact. group: of `tiling.parallel`, ranks that hold
    the same x0, call together and differentiate the same function of the pixels. The caller makes the VAE
    resident until after the backward pass, which computes activations again.
    """
    piece = partial(_unit_pixels, components, decode_videos)
    if tiling is None:
        return piece(x0)
    return decode_tiled(piece, x0, _grid(components, x0, tiling, group), _frames(components, x0))


def differentiate_decoded[T](
    components: WanComponents,
    x0: torch.Tensor,
    objective: Objective[T],
    tiling: VaeTiling | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[T, torch.Tensor]:
    """Loss of the pixels that `decode_differentiable` gives, differentiated in two phases for little memory.

    objective: pixels, a leaf with a gradient, to (scalar loss, result); called once. Returns (result, the
    loss's gradient for x0: float32, shaped as x0). The VAE is resident while it decodes, not while the
    objective runs. Other arguments as for `decode_differentiable`.
    """
    return result_and_gradient(
        # The same decoder in both phases; the first one takes no more memory than the second.
        partial(_unit_pixels, components, decode_frames),
        x0,
        objective,
        _grid(components, x0, tiling, group),
        _frames(components, x0),
        lambda: components.resident(components.vae),
    )


def _unit_pixels(
    components: WanComponents,
    decoder: Callable[[AutoencoderKLWan, torch.Tensor], torch.Tensor],
    x0: torch.Tensor,
) -> torch.Tensor:
    vae = components.vae
    mean, inverse_std = _statistics(components, vae.dtype)
    latents = x0.to(components.device, vae.dtype) / inverse_std + mean
    # As in `decode`: this much in the VAE's dtype.
    pixels = decoder(vae, latents) * 0.5 + 0.5
    return pixels.to(at_least_float32(pixels.dtype))


def _grid(
    components: WanComponents, x0: torch.Tensor, tiling: VaeTiling | None, group: dist.ProcessGroup | None
) -> TileGrid:
    height, width = x0.shape[-2:]
    scale = int(components.vae.config["scale_factor_spatial"])
    if tiling is None:
        return tile_grid(height, width, scale)
    sides = (tiling.height, tiling.width, tiling.overlap)
    assert all(side % scale == 0 for side in sides), (sides, scale)
    assert group is not None or not tiling.parallel, tiling
    rows, columns, overlap = (side // scale for side in sides)
    return tile_grid(height, width, scale, (rows, columns), overlap, group if tiling.parallel else None)


def _frames(components: WanComponents, x0: torch.Tensor) -> int:
    """Frames of the video that (N, z, f, h, w) latents decode to."""
    return int(components.vae.config["scale_factor_temporal"]) * (x0.shape[2] - 1) + 1


def _statistics(components: WanComponents, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / std) of latents, (1, z, 1, 1, 1) each; the reciprocal is Diffusers' order of rounding."""
    config = components.vae.config
    mean = torch.tensor(config["latents_mean"]).view(1, -1, 1, 1, 1).to(components.device, dtype)
    std = torch.tensor(config["latents_std"]).view(1, -1, 1, 1, 1).to(components.device, dtype)
    return mean, 1.0 / std
