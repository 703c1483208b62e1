# ruff: noqa: T201
"""How far a decode in tiles is from the exact one, beside Diffusers' own tiling.

    python benchmarks/vae_tiles.py [--base_dim N] [--latents N]

VAEs of both Wan layouts at a small width with random weights, one square frame. Values: root mean square
error of the pixels over their standard deviation. Gradients of the latents: norm of the error over the norm,
for a random linear function of the pixels and for the squared distance to a smooth picture. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch.nn import functional

from wan_trainer.models.wan.vae_decoder import decode_frames
from wan_trainer.models.wan.vae_tiles import decode_tiled, tile_grid

LAYOUTS: dict[str, dict[str, Any]] = {
    "wan2.1": {},
    "wan2.2": {
        "is_residual": True,
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "scale_factor_spatial": 16,
    },
}
# In sixteenths of the frame: tile, overlap.
TILES = ((12, 0), (12, 2), (12, 4), (12, 8), (8, 4), (8, 6))


def build(layout: str, base_dim: int) -> AutoencoderKLWan:
    """A VAE whose norms and biases are not the identity."""
    values = LAYOUTS[layout] | ({"decoder_base_dim": base_dim} if layout == "wan2.2" else {})
    vae = AutoencoderKLWan(base_dim=base_dim, z_dim=16, **values).eval().requires_grad_(False)
    for name, parameter in vae.named_parameters():
        if parameter.ndim == 1 or "gamma" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
    return vae


def measure(layout: str, base_dim: int, side: int) -> list[dict[str, float]]:
    vae = build(layout, base_dim)
    scale = int(vae.config["scale_factor_spatial"])

    def decode(x: torch.Tensor) -> torch.Tensor:
        return decode_frames(vae, x)

    x0 = torch.randn(1, 16, 1, side, side).requires_grad_()
    exact = decode(x0)
    weight = torch.randn_like(exact)
    picture = functional.interpolate(torch.randn(1, 3, 1, 4, 4), size=exact.shape[2:], mode="trilinear")
    objectives: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "linear": lambda pixels: (pixels * weight).sum(),
        "distance": lambda pixels: (pixels - picture).square().sum(),
    }

    def gradients(pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: torch.autograd.grad(objective(pixels), x0, retain_graph=True)[0]
            for name, objective in objectives.items()
        }

    def error(found: torch.Tensor, expected: torch.Tensor, spread: torch.Tensor) -> float:
        return round(float((found - expected).detach().norm() / spread.detach().norm()), 4)

    rows: list[dict[str, float]] = []
    of_exact = gradients(exact)
    for tile, overlap in ((side * tile // 16, side * overlap // 16) for tile, overlap in TILES):
        pixels = decode_tiled(decode, x0, tile_grid(side, side, scale, (tile, tile), overlap), 1)
        vae.enable_tiling(tile * scale, tile * scale, (tile - overlap) * scale, (tile - overlap) * scale)
        with torch.no_grad():
            theirs = vae.decode(x0, return_dict=False)[0]
        row: dict[str, float] = {"tile": tile, "overlap": overlap}
        row |= {"values": error(pixels, exact, exact - exact.mean())}
        row |= {"values_diffusers": error(theirs, exact, exact - exact.mean())}
        found = gradients(pixels)
        row |= {f"gradient_{name}": error(found[name], of_exact[name], of_exact[name]) for name in objectives}
        print(layout, *(f"{key} {value:g}" for key, value in row.items()), sep="  ", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base_dim", type=int, default=8)
    parser.add_argument("--latents", type=int, default=16, help="a side of the frame")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps({name: measure(name, arguments.base_dim, arguments.latents) for name in LAYOUTS}))


if __name__ == "__main__":
    main()
