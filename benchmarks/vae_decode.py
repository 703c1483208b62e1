# ruff: noqa: T201
"""Peak memory and time of a VAE decode with a gradient: this package's decoder against Diffusers'.

    python benchmarks/vae_decode.py [--base_dim N] [--videos N] [--frames N] [--height N] [--width N]

A float32 VAE of Wan2.1's structure with random weights and a small stand-in reward of a few convolutions on
the pixels. Each side runs forward and backward in a fresh process; its memory is the process's peak
(ru_maxrss) less that after loading and a warm-up on a few pixels. Gradients of the latents are compared with
those that Diffusers' decode gives by plain autograd. Sides: `diffusers`; `ours`, in two phases; `one_phase`,
the same decoder under plain autograd; `plain_convolutions`, two phases with convolutions that keep their
input; `tiled`, two phases in 2 x 2 tiles (another result: an approximation). The decode without a gradient,
as a rollout needs it, follows for both decoders. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WITH_GRADIENT = ("diffusers", "ours", "one_phase", "plain_convolutions", "tiled")
WITHOUT_GRADIENT = ("diffusers_no_grad", "ours_no_grad")


def run_side(arguments: argparse.Namespace, side: str, gradient: Path) -> dict[str, float]:
    """Measure `side` in this process, which has imported nothing heavy before."""
    # PyTorch and Diffusers belong to the child processes: a parent that is large would count in their peaks.
    import torch  # noqa: PLC0415
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    from wan_trainer.models.wan import vae_decoder  # noqa: PLC0415
    from wan_trainer.models.wan.vae_backward import result_and_gradient  # noqa: PLC0415
    from wan_trainer.models.wan.vae_tiles import tile_grid  # noqa: PLC0415

    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=arguments.base_dim, z_dim=16).eval().requires_grad_(False)
    del vae.encoder
    width = arguments.reward_width
    layers: list[nn.Module] = []
    for channels in (3, width, width):
        layers += [nn.Conv3d(channels, width, 3, padding=1), nn.GELU()]
    reward = nn.Sequential(*layers).requires_grad_(False)

    def objective(pixels: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reward(pixels).square().mean(), None

    def diffusers(x: torch.Tensor) -> torch.Tensor:
        return vae.decode(x, return_dict=False)[0]

    def ours(x: torch.Tensor) -> torch.Tensor:
        return vae_decoder.decode_frames(vae, x)

    def plainly(decode: Callable[[torch.Tensor], torch.Tensor], x0: torch.Tensor) -> torch.Tensor:
        leaf = x0.clone().requires_grad_()
        return torch.autograd.grad(objective(decode(leaf))[0], leaf)[0]

    def in_two_phases(x0: torch.Tensor) -> torch.Tensor:
        high, wide = x0.shape[-2:]
        overlap = min(high, wide) // 4
        tile = ((high + overlap + 1) // 2, (wide + overlap + 1) // 2) if side == "tiled" else None
        grid = tile_grid(high, wide, 8, tile, overlap)
        return result_and_gradient(ours, x0, objective, grid, 4 * (x0.shape[2] - 1) + 1)[1]

    def work(x0: torch.Tensor) -> torch.Tensor:
        if side == "diffusers":
            return plainly(diffusers, x0)
        if side == "one_phase":
            return plainly(ours, x0)
        if side in WITHOUT_GRADIENT:
            with torch.no_grad():
                return (diffusers if side == "diffusers_no_grad" else ours)(x0)
        return in_two_phases(x0)

    if side == "plain_convolutions":
        vae_decoder.frozen_conv = lambda conv, x: conv._conv_forward(x, conv.weight, conv.bias)
    frames = (arguments.frames - 1) // 4 + 1
    work(torch.randn(1, 16, 2, 2, 2))
    x0 = torch.randn(arguments.videos, 16, frames, arguments.height // 8, arguments.width // 8)
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, processor = time.perf_counter(), time.process_time()
    result = work(x0)
    wall, processor = time.perf_counter() - started, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    np.save(gradient, result.numpy())
    mib = 1 / 1024
    return {
        "peak_mib": round((peak - baseline) * mib, 1),
        "after_load_mib": round(baseline * mib, 1),
        "wall_s": round(wall, 2),
        "processor_s": round(processor, 2),
        "threads": torch.get_num_threads(),
    }


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    sides: dict[str, dict[str, float]] = {}
    for side in (*WITH_GRADIENT, *WITHOUT_GRADIENT):
        output = directory / f"{side}.npy"
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--output", str(output)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sides[side] = json.loads(done.stdout.splitlines()[-1])
        reference = np.load(
            directory / f"{'diffusers' if side in WITH_GRADIENT else 'diffusers_no_grad'}.npy"
        )
        difference = np.linalg.norm(np.load(output) - reference) / np.linalg.norm(reference)
        sides[side]["relative_difference"] = float(f"{difference:.3g}")
        print(
            f"{side:20}{sides[side]['peak_mib']:10,.0f} MiB{sides[side]['wall_s']:8.1f} s"
            f"{sides[side]['processor_s']:8.1f} s of processor   difference {difference:.2g}",
            flush=True,
        )

    def ratio(key: str, side: str, other: str) -> float:
        return round(sides[side][key] / sides[other][key], 3)

    return {
        "memory_ratio": ratio("peak_mib", "ours", "diffusers"),
        "time_ratio": ratio("processor_s", "ours", "diffusers"),
        "memory_ratio_one_phase": ratio("peak_mib", "one_phase", "diffusers"),
        "memory_ratio_plain_convolutions": ratio("peak_mib", "plain_convolutions", "diffusers"),
        "no_grad_memory_ratio": ratio("peak_mib", "ours_no_grad", "diffusers_no_grad"),
        "no_grad_time_ratio": ratio("processor_s", "ours_no_grad", "diffusers_no_grad"),
        "videos": [arguments.videos, arguments.frames, arguments.height, arguments.width],
        "base_dim": arguments.base_dim,
        "sides": sides,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base_dim", type=int, default=32, help="width of the last level; Wan2.1 has 96")
    parser.add_argument("--videos", type=int, default=2)
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--height", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--reward_width", type=int, default=24, help="channels of the stand-in reward")
    parser.add_argument("--side", choices=(*WITH_GRADIENT, *WITHOUT_GRADIENT), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(run_side(arguments, arguments.side, arguments.output)))
        return
    with tempfile.TemporaryDirectory(prefix="vae-decode-") as directory:
        print(json.dumps(measure(arguments, Path(directory))))


if __name__ == "__main__":
    main()
