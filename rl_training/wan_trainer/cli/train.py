"""`wan-trainer train`: what torchrun runs on each rank; alone it is a run of one process."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import gc
import os
import sys

from wan_trainer.cli.main import main

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; unknown ones are config overrides."""
    parser.add_argument("--config", required=True, help="the recipe (YAML)")
    parser.add_argument(
        "--allow_changed",
        action="append",
        default=[],
        metavar="KEY",
        help="continue a run although this config key differs from what it was started with; repeatable",
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Train; the exit status is 0 done, 1 failure, 2 bad input, 75 stopped by a signal after saving."""
    # The libraries read these once, when they are imported: training asks no network for a file.
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    # Thousands of modules that stay: a collection would visit all of them, now and in training.
    gc.disable()
    # Not above: this is the ranks' main module, which every spawned data worker imports again.
    from wan_trainer.config import load_with_sources  # noqa: PLC0415
    from wan_trainer.distributed.collectives import SharedUserError  # noqa: PLC0415
    from wan_trainer.distributed.mesh import RendezvousError  # noqa: PLC0415
    from wan_trainer.training import run as runs  # noqa: PLC0415
    from wan_trainer.training.optimizer import NonFiniteError  # noqa: PLC0415
    from wan_trainer.types import EXIT_BAD_INPUT, EXIT_FAILURE, RunFailure, UserError  # noqa: PLC0415

    gc.freeze()
    gc.enable()

    # What every rank would say alike is said by one rank of each machine.
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        start = runs.plan_start(load_with_sources(args.config, rest))
    except UserError:
        if speaks:
            raise
        return EXIT_BAD_INPUT
    try:
        return runs.train(start, allow_changed=args.allow_changed)
    except SharedUserError:
        if speaks:
            raise
        return EXIT_BAD_INPUT
    except (RendezvousError, RunFailure, NonFiniteError) as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except OSError as error:
        # A full or vanished disk, on this rank only; the error names the path.
        print(f"error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
