"""`wan-trainer export`: a checkpoint in the formats that other programs load."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
from pathlib import Path

from wan_trainer.cli.train import OFFLINE

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint-<step> directory, or a run's output_dir for its newest one",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("diffusers", "lora"),
        help="a pipeline directory (adapters merged), or the adapters of each expert",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a directory not there yet")
    parser.add_argument("--ema", action="store_true", help="the averages in place of the last weights")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="auto",
        help="of what was trained; auto: for a pipeline the model directory's, for adapters float32",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the model directory the run started from, when run.json does not lead to it",
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Write the export and print what it consists of."""
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    # Not above: the help of a command should not wait for PyTorch.
    from wan_trainer.export.source import base_model, open_source  # noqa: PLC0415
    from wan_trainer.export.write import export_diffusers, export_lora  # noqa: PLC0415
    from wan_trainer.sampling.dtypes import DTYPES  # noqa: PLC0415

    dtype = None if args.dtype == "auto" else DTYPES[args.dtype]
    source = open_source(args.checkpoint, ema=args.ema)
    if args.to == "lora":
        written = export_lora(source, args.out, dtype)
    else:
        written = export_diffusers(source, base_model(source, args.model), args.out, dtype)
    for part in written.parts:
        print(part)
    print(f"{written.out}: {source.checkpoint.name}, {args.to}")
    return 0
