"""`wan-trainer plan`: what a recipe amounts to at a topology, on any machine."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
from pathlib import Path

from wan_trainer.config.load import load_config
from wan_trainer.planning.plan import make_plan
from wan_trainer.planning.text import describe
from wan_trainer.planning.timing import measured_phase_times, parse_phase_times


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; unknown ones are configuration overrides."""
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe (YAML)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default 1)")
    parser.add_argument("--nproc", type=int, default=8, help="processes on each machine (default 8)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default text")
    times = parser.add_mutually_exclusive_group()
    times.add_argument(
        "--phase_times",
        metavar="rollout=S,reward=S,replay=S",
        help="seconds of each phase of a step, for the step time with and without delay",
    )
    times.add_argument(
        "--from_run", type=Path, metavar="RUN_DIR", help="take the seconds of each phase from a run"
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the plan, or raise UserError when the numbers do not fit together."""
    phases = None
    if args.phase_times is not None:
        phases = parse_phase_times(args.phase_times)
    elif args.from_run is not None:
        phases = measured_phase_times(args.from_run)
    plan = make_plan(load_config(args.config, rest), args.nodes, args.nproc, phases)
    print(json.dumps(plan.as_data(), indent=2) if args.format == "json" else describe(plan))
    return 0
