"""`wan-trainer verify`: whether checkpoints are what their manifests say."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
from pathlib import Path

from wan_trainer.recording.manifest import MANIFEST, NAME, checkpoint_at, named_checkpoints, verify_checkpoint
from wan_trainer.types import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint-<step> directory, or a run's output_dir for all of its checkpoints",
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """0 when every file has the size and sha256 of its manifest; otherwise one line per problem."""
    problems: list[str] = []
    for checkpoint in _named(args.checkpoint):
        try:
            manifest = verify_checkpoint(checkpoint)
        except UserError as error:
            problems += error.problems
            continue
        content = f"{len(manifest.files)} files, {manifest.size:,} bytes, step {manifest.step}"
        print(f"{checkpoint}: whole ({content})", flush=True)
    if problems:
        raise UserError(*problems)
    return 0


def _named(path: Path) -> list[Path]:
    """The checkpoints the argument stands for; those of a run include what only looks like one."""
    of_a_run = path.is_dir() and not (path / MANIFEST).is_file() and not NAME.fullmatch(path.resolve().name)
    return (named_checkpoints(path) if of_a_run else []) or [checkpoint_at(path)]
