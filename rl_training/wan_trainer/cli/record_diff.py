"""`wan-trainer record-diff`: what differs between two runs."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

from wan_trainer.recording.record_diff import differences, load_record

_EQUAL, _DIFFERENT = 0, 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for name in ("first", "second"):
        parser.add_argument(name, type=Path, metavar="RUN", help="the output_dir of a run, or its run.json")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """0 when the runs were set up alike, 1 when not: `key: first | second`, by group."""
    found = differences(load_record(args.first), load_record(args.second))
    for group, members in groupby(found, key=lambda difference: difference.group):
        print(group)
        for difference in members:
            key = f"{difference.key}: " if difference.key else ""
            print(f"  {key}{difference.first} | {difference.second}")
    if not found:
        print("no differences")
    return _DIFFERENT if found else _EQUAL
