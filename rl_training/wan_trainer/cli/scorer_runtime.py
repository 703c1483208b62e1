"""`wan-trainer scorer-runtime`: the libraries that evaluators score with, against the lock."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from wan_trainer.rewards.runtime import ScorerRuntime, scorer_runtime
from wan_trainer.types import EXIT_DONE, EXIT_FAILURE


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """0 when evaluators can score here, 1 when something would make scores wrong or fail."""
    runtime = scorer_runtime()
    if args.json:
        facts = asdict(runtime) | {
            "fingerprint": runtime.fingerprint,
            "problems": runtime.problems,
            "deviations": runtime.deviations,
        }
        print(json.dumps(facts, indent=2))
    else:
        _show(runtime)
    return EXIT_FAILURE if runtime.problems else EXIT_DONE


def _show(runtime: ScorerRuntime) -> None:
    table = Table("package", "locked", "installed")
    for package in runtime.packages:
        table.add_row(package.name, package.locked or "-", package.installed or "-")
    Console(highlight=False).print(table)
    print(f"python       {runtime.python}")
    print(f"HoughLinesP  {runtime.lines_layout}")
    print(f"fingerprint  {runtime.fingerprint}")
    for line in runtime.deviations:
        print(f"differs      {line}")
    for line in runtime.problems:
        print(f"error        {line}")
