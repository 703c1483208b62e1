"""`wan-trainer probe-reward`: scores clips whose worth is known with the rule evaluator."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from wan_trainer.config.family import known_family
from wan_trainer.config.load import load_with_sources
from wan_trainer.data.dataset import load_dataset
from wan_trainer.preflight.checks import resolve_here
from wan_trainer.preflight.reward_probe import first_of_each_task, probe_evaluator
from wan_trainer.rewards.clips import CLIPS
from wan_trainer.rewards.probe import TaskProbe
from wan_trainer.types import EXIT_DONE, EXIT_FAILURE, UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; unknown ones are configuration overrides."""
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe (YAML)")
    parser.add_argument("--samples", type=int, default=1, help="samples of each task (default 1)")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """0 when every task is sound, 1 when one is not, 2 when the evaluator cannot be used."""
    if args.samples < 1:
        raise UserError(f"--samples is {args.samples}; try 1 or more of each task")
    config = load_with_sources(args.config, rest).config
    # No model is needed here: shapes are checked by the rules that all families share.
    spec = resolve_here(config, known_family(config) or "t2v-1.3b")
    if spec.reward.rule is None:
        raise UserError("grpo_reward_fn: names no rule evaluator; name vbvr_rule there or in reward_monitor")
    samples = first_of_each_task(load_dataset(spec.data), args.samples)
    print(f"probe     {len(samples)} samples, {len(CLIPS)} clips each", flush=True)
    probes = probe_evaluator(spec.reward.rule, spec.data, samples)
    Console().print(table(probes))
    problems = [line for probe in probes for line in probe.problems]
    for line in problems:
        print(f"warning   {line}")
    sound = "every task is sound" if not problems else f"{len(problems)} warnings: see above"
    print(f"probe     {sound}")
    return EXIT_FAILURE if problems else EXIT_DONE


def table(probes: Sequence[TaskProbe]) -> Table:
    """The mean reward of each clip of each task."""
    shown = Table(Column("task", overflow="fold"), *CLIPS)
    for probe in probes:
        cells = ("-" if math.isnan(value) else f"{value:.3f}" for value in probe.means.values())
        shown.add_row(Text(probe.task), *cells)
    return shown
