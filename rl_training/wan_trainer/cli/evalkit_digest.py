"""`wan-trainer evalkit-digest`: the digest that a config pins its evaluator with."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
from pathlib import Path

from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.types import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", type=Path, help="the evaluator's checkout (holds run_evaluation.py)")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the digest alone, fit for `vbvr_reward_evalkit_source_sha256`."""
    try:
        digest = source_sha256(args.directory)
    except UserError as error:
        # Here the directory is the argument of a command, not the value of a key.
        raise UserError(
            *(line.removeprefix("vbvr_reward_evalkit_dir: ") for line in error.problems)
        ) from None
    print(digest)
    return 0
