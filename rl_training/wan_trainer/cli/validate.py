"""`wan-trainer validate`: the launcher's preflight. Prints every failing check at once; loads no weights."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import wan_trainer
from wan_trainer.config.contract import common_values
from wan_trainer.config.load import LoadedConfig, load_with_sources
from wan_trainer.config.specs import RunSpec
from wan_trainer.models.wan.base_lora_files import base_lora_identity
from wan_trainer.preflight.checks import DEFAULT_ADDRESS, DEFAULT_PORT, resolve_here, run_checks
from wan_trainer.preflight.finding import Finding
from wan_trainer.preflight.paths import check_named_paths
from wan_trainer.preflight.reward_probe import check_probes
from wan_trainer.preflight.rollcall import NodeReport, call_roll
from wan_trainer.recording.identity import code_digest
from wan_trainer.targets import make_importable, source_digests
from wan_trainer.types import EXIT_BAD_INPUT, UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; unknown ones are config overrides."""
    parser.add_argument("--config", required=True, help="the recipe (YAML)")
    parser.add_argument("--nodes", type=int, default=_from_environment("WORLD_SIZE", 1), help="machines")
    parser.add_argument("--nproc", type=int, default=8, help="processes on each machine (default 8)")
    parser.add_argument("--node-rank", type=int, default=_from_environment("RANK", 0), help="this machine")
    parser.add_argument(
        "--join", action="store_true", help="wait for the other machines and compare their configuration"
    )
    # The launcher hands the trainer's arguments to both; what a resume may change is checked by the run.
    parser.add_argument("--allow_changed", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--facts", type=Path, help="file for the values that the launcher needs")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """0 when a run can start here, 2 when something must be mended first."""
    started = time.monotonic()
    node = f"node {args.node_rank} ({socket.gethostname()})"
    if not 0 <= args.node_rank < args.nodes:
        raise UserError(
            f"--node-rank is {args.node_rank}: set it in 0..{args.nodes - 1} (--nodes is {args.nodes})"
        )
    try:
        loaded = load_with_sources(args.config, rest)
    except UserError as error:
        lines = [Finding(line) for line in error.problems]
        _report(node, [*lines, *check_named_paths(args.config, rest, error.problems)], started)
        return EXIT_BAD_INPUT
    make_importable(loaded.path.parent)
    problems = run_checks(loaded.config, args.nodes, args.nproc, args.node_rank, os.environ)
    if any(problem.kind == "error" for problem in problems):
        _report(node, problems, started)
        return EXIT_BAD_INPUT
    spec = resolve_here(loaded.config)
    if args.node_rank == 0 and spec.reward.rule is not None:
        problems += check_probes(spec.reward.rule, spec.data)
    if args.join and args.nodes > 1:
        problems += [Finding(line) for line in _call_roll(args, loaded, spec)]
    _report(node, problems, started)
    if any(problem.kind == "error" for problem in problems):
        return EXIT_BAD_INPUT
    if args.facts is not None:
        write_facts(args.facts, spec)
    return 0


def _from_environment(name: str, default: int) -> int:
    value = os.environ.get(name, "").strip()
    if not value:
        return default
    if not value.isdecimal():
        raise UserError(
            f"{name} is {value!r}, not a whole number: set it as on the other machines, or unset it"
        )
    return int(value)


def write_facts(path: Path, spec: RunSpec) -> None:
    """`key=value` lines: what the launcher must know and only the resolved config says."""
    facts = {
        "device": spec.device,
        "output_dir": spec.output.output_dir,
        "rendezvous_timeout_s": math.ceil(spec.rendezvous_timeout_s),
    }
    if spec.refl is not None:
        facts["algorithm"] = "refl"
    judge = spec.reward.judge
    if judge is not None:
        facts |= {"judge_url": judge.base_url, "judge_model": judge.model}
    path.write_text("".join(f"{key}={value}\n" for key, value in facts.items()), encoding="utf-8")


def _call_roll(args: argparse.Namespace, loaded: LoadedConfig, spec: RunSpec) -> list[str]:
    report = NodeReport(
        args.node_rank,
        socket.gethostname(),
        args.nodes,
        args.nproc,
        code_digest(Path(wan_trainer.__file__).parent),
        {
            **common_values(loaded.config),
            "device": spec.device,
            **{f"the source of {key}": digest for key, digest in source_digests(spec).items()},
            **base_lora_identity(spec.model.path, spec.model.base_lora),
        },
    )
    address = os.environ.get("MASTER_ADDR") or DEFAULT_ADDRESS
    port = _from_environment("MASTER_PORT", DEFAULT_PORT)
    if args.node_rank == 0:
        names = ", ".join(str(node) for node in range(1, args.nodes))
        print(f"preflight: waiting for node {names} at port {port}, {spec.rendezvous_timeout_s:g} s at most")
    else:
        print(f"preflight: reporting to node 0 at {address}:{port}, {spec.rendezvous_timeout_s:g} s at most")
    sys.stdout.flush()
    return call_roll(report, address, port, spec.rendezvous_timeout_s)


def _report(node: str, problems: Sequence[Finding], started: float) -> None:
    for kind in ("note", "warning", "error"):
        for problem in problems:
            if problem.kind == kind:
                print(problem.line(node), file=sys.stdout if kind == "note" else sys.stderr)
    errors = sum(problem.kind == "error" for problem in problems)
    warnings = sum(problem.kind == "warning" for problem in problems)
    verdict = f"{errors} to mend" if errors else "passed"
    tail = f", {warnings} warnings" if warnings else ""
    sys.stdout.flush()
    stream = sys.stderr if errors else sys.stdout
    print(
        f"preflight: {verdict} on {node}{tail} ({time.monotonic() - started:.1f} s)", file=stream, flush=True
    )
