"""`wan-trainer prefetch-attention-kernel`: fill the offline cache with the attention kernel of a backend."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
from pathlib import Path

from wan_trainer.models.wan.kernel_cache import kernels_cache


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--attention_backend",
        default="_flash_3_hub",
        metavar="NAME",
        help="the backend, by its Diffusers name (default _flash_3_hub)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where to put it (default WAN_TRAINER_KERNELS_CACHE, else ~/.cache/wan-trainer/kernels)",
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Fetch, and say what came with which digest."""
    from wan_trainer.models.wan.hub_kernels import fetch_hub_kernel  # noqa: PLC0415 - imports torch

    cache = (args.cache or kernels_cache(os.environ)).expanduser().absolute()
    for receipt in fetch_hub_kernel(args.attention_backend, cache):
        print(
            f"{receipt.repo_id} v{receipt.version} (commit {receipt.commit}): {receipt.variant}, "
            f"{receipt.files} files, {receipt.bytes / 1e6:.1f} MB"
        )
        print(f"sha256 {receipt.sha256}")
    print(f"cache: {cache}")
    return 0
