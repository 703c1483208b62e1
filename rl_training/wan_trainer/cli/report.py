"""`wan-trainer report`: a run as one HTML page that needs no network."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
from pathlib import Path

from wan_trainer.report.page import render_report
from wan_trainer.types import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the output_dir of a run, finished or not"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write (default: RUN_DIR/report.html)"
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Write the report and print its path."""
    try:
        path = render_report(args.run_dir, args.out)
    except OSError as error:
        problem = f"the report cannot be written ({error}): choose a place for it with --out"
        raise UserError(problem) from error
    print(path)
    return 0
