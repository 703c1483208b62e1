"""An objective of decoded pixels and its gradient for the latents, without the two graphs ever meeting.

Plain autograd keeps what the decode needs for its backward while the objective is computed, for all videos.
Here the pixels come from a decode without a gradient, the objective's backward ends at them, and then one
video, or one tile of one, after the other is decoded again and differentiated with the pixels' gradient. The
gradient is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from wan_trainer.models.wan.vae_tiles import Decode, TileGrid, at_least_float32

type Objective[T] = Callable[[torch.Tensor], tuple[torch.Tensor, T]]
"""Pixels (N, 3, F, H, W) to a scalar loss and whatever else the caller wants back."""


def result_and_gradient[T](
    decode: Decode,
    x0: torch.Tensor,
    objective: Objective[T],
    grid: TileGrid,
    frames: int,
    decoding: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[T, torch.Tensor]:
    """What `objective` returned beside the loss, and the loss's gradient for x0, shaped as x0.

    decode: of one video or tile (1, z, f, h, w), differentiable. objective: is called once, with autograd on
    and pixels that are a leaf; a loss that does not depend on them has the gradient 0. Every rank of the
    grid's group must compute the same loss. decoding: entered around each of the two decodes.
    """
    with decoding():
        pixels = _pixels(decode, x0, grid, frames)
    result, of_pixels = _differentiate(objective, pixels)
    del pixels
    with decoding():
        return result, _pull_back(decode, x0, of_pixels, grid)


@torch.no_grad()
def _pixels(decode: Decode, x0: torch.Tensor, grid: TileGrid, frames: int) -> torch.Tensor:
    pixels = grid.canvas(len(x0), frames, x0)
    for video, out in zip(x0.split(1), pixels.split(1), strict=True):
        grid.blend({index: decode(grid.latents(video, index)) for index in grid.own}, out)
    return pixels


def _differentiate[T](objective: Objective[T], pixels: torch.Tensor) -> tuple[T, torch.Tensor]:
    with torch.enable_grad():
        leaf = pixels.requires_grad_()
        loss, result = objective(leaf)
        assert loss.ndim == 0, loss.shape
        if not loss.requires_grad:
            return result, torch.zeros_like(pixels)
        (gradient,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
    return result, gradient


def _pull_back(decode: Decode, x0: torch.Tensor, of_pixels: torch.Tensor, grid: TileGrid) -> torch.Tensor:
    """The gradient of the latents from that of the pixels, with one piece's graph alive at a time."""
    gradient = torch.zeros_like(x0, dtype=at_least_float32(x0.dtype))
    for video, given, out in zip(x0.split(1), of_pixels.split(1), gradient.split(1), strict=True):
        parts: dict[int, torch.Tensor] = {}
        for index in grid.own:
            part = grid.latents(video, index).detach().clone()
            weighted = grid.weighted(grid.pixels(given, index), index)
            parts[index] = _piece(decode, part, weighted)
        grid.add_latents(parts, out)
    return gradient


def _piece(decode: Decode, latents: torch.Tensor, of_pixels: torch.Tensor) -> torch.Tensor:
    if not of_pixels.any():
        return torch.zeros_like(latents)
    with torch.enable_grad():
        decoded = decode(latents.requires_grad_())
        (gradient,) = torch.autograd.grad(decoded, latents, of_pixels.to(decoded.dtype))
    return gradient
