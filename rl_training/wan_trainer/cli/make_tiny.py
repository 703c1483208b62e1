# ruff: noqa: T201
"""`wan-trainer make-tiny`: write a tiny Diffusers-format pipeline."""

from __future__ import annotations

import argparse
from pathlib import Path

from wan_trainer.tiny.models import TINY_FAMILIES, make_tiny
from wan_trainer.types import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to `parser`."""
    parser.add_argument("--family", required=True, choices=TINY_FAMILIES, help="model family to imitate")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default 0)")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Write the directory and say where it is."""
    if rest:
        raise UserError(f"{rest[0]}: make-tiny takes --family, --out and --seed only")
    out = make_tiny(args.family, args.out.absolute(), seed=args.seed)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{args.family} tiny model, {size / 1e6:.1f} MB: {out}")
    return 0
