# ruff: noqa: T201
"""Kills runs at moments drawn over all phases of a step, continues them, and compares bit for bit.

    python benchmarks/kill_resume.py [--kills N] [--launched N] [--seed S] [--keep DIR]

Two gloo ranks train a tiny model in float32 with a replay delayed by one step. SIGKILL hits one rank or both,
at an offset into a phase of the step: phases in turn, so that none is missed, and everything else at random.
Ranks come from a server that has imported the libraries already; the training they run is `train` itself.
After each kill: no rank is left, neither its lock nor its port is taken, the newest checkpoint verifies, and
the continued run ends with the weights, optimizer, averages, metrics (but times and memory) and trained
samples of a run that nobody killed.

A few more runs come from the fish launcher, with scorer processes and data workers: one rank, torchrun or the
whole job is killed from outside at any time, nothing of the job may be left, and the same comparison follows.
They train on-policy: without torchrun ranks save where they are, which with a delay is another run.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from rl_training.tests.training import kills, launched_kills
from rl_training.tests.training.launched_kills import REAL_PARTS, Job
from rl_training.tests.training.runs import tiny_recipe, write_recipe
from wan_trainer.data.unpack import unpack
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.tiny.models import make_tiny
from wan_trainer.tiny.tasks import write_archives
from wan_trainer.tiny.world import evalkit_source

# A moment that comes after the run has ended is drawn again, this often at most for each kill.
TRIES = 3


def build_recipe(out: Path) -> Path:
    """A tiny run with all its parts in `out`."""
    model = make_tiny("ti2v-5b", out / "model")
    write_archives(out / "archives", samples_per_task=4)
    unpack(
        out / "archives",
        out / "data",
        source_revision="tiny",
        expected_tasks=2,
        expected_samples=8,
        workers=1,
    )
    evalkit = out / "evalkit"
    shutil.copytree(evalkit_source(), evalkit, ignore=shutil.ignore_patterns("__pycache__"))
    values = tiny_recipe(out / "run", model, out / "data" / "dataset.json", evalkit, source_sha256(evalkit))
    return write_recipe(out / "recipe.yaml", values)


def benchmark(out: Path, count: int, seed: int, limit_s: float) -> dict[str, object]:
    """Kill and continue `count` runs; how many ended equal, and what each victim was doing."""
    recipe = build_recipe(out)
    whole = out / "whole"
    began = time.monotonic()
    kills.complete_run(recipe, whole, out / "scratch")
    print(f"uninterrupted: {time.monotonic() - began:.1f} s", flush=True)
    spans = kills.reference_spans(whole)
    generator = random.Random(seed)
    phases: Counter[str] = Counter()
    killed = equal = saving = pending = late = 0
    for index in range(count * TRIES):
        if killed == count or time.monotonic() - began > limit_s:
            break
        kill = kills.draw(spans, index, generator)
        run_dir = out / f"run-{index}"
        said = kills.kill_and_continue(recipe, run_dir, kill, out / "scratch")
        if said is None:
            late += 1
        else:
            killed += 1
            phases[said["phase"]] += 1
            saving += bool(said["saving"])
            pending += bool(said["pending"])
            found = kills.differences(whole, run_dir)
            equal += not found
            outcome = "equal" if not found else f"DIFFERS: {found[:5]}"
            who = "all ranks" if kill.whole else f"rank {kill.victim}"
            print(f"{killed}: {who} in {said['phase']}, from {said['from']}: {outcome}", flush=True)
        shutil.rmtree(run_dir)
    return {
        "kills": killed,
        "bit_equal": equal,
        "per_phase": dict(sorted(phases.items())),
        "during_save": saving,
        "with_pending_rollout": pending,
        "after_the_end": late,
        "asked": count,
        "seconds": round(time.monotonic() - began, 1),
    }


def benchmark_launched(out: Path, count: int, seed: int) -> dict[str, object]:
    """The same with `count` runs of the launcher, killed from outside."""
    if count == 0:
        return {"launched_kills": 0, "launched_bit_equal": 0}
    values = yaml.safe_load((out / "recipe.yaml").read_text())
    recipe = write_recipe(out / "launched.yaml", {**values, **REAL_PARTS})
    log, whole = out / "launched.log", out / "launched-whole"
    Job(recipe, whole, log).complete()
    length_s = launched_kills.training_s(whole)
    print(f"uninterrupted, by the launcher: {length_s:.1f} s from its first span", flush=True)
    generator = random.Random(seed)
    victims: Counter[str] = Counter()
    equal = 0
    for index in range(count * TRIES):
        if victims.total() == count:
            break
        run_dir = out / f"launched-{index}"
        who = launched_kills.kill_and_continue(Job(recipe, run_dir, log), length_s, generator)
        if who is not None:
            victims[who] += 1
            found = kills.differences(whole, run_dir)
            equal += not found
            print(f"launched {victims.total()}: {who}: {found[:5] or 'equal'}", flush=True)
    return {
        "launched_kills": victims.total(),
        "launched_bit_equal": equal,
        "launched_victims": dict(sorted(victims.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--launched", type=int, default=3, help="kills of runs that the launcher starts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit_s", type=float, default=3600.0, help="no kill starts later than this")
    parser.add_argument("--keep", type=Path, help="work here and leave everything")
    args = parser.parse_args()
    out = args.keep or Path(tempfile.mkdtemp(prefix="kill-resume-"))
    try:
        result = benchmark(out, args.kills, args.seed, args.limit_s)
        result |= benchmark_launched(out, args.launched, args.seed)
    finally:
        if args.keep is None:
            shutil.rmtree(out, ignore_errors=True)
    print(json.dumps(result))
    ended = result["kills"] == result["bit_equal"] == args.kills
    ended = ended and result["launched_kills"] == result["launched_bit_equal"] == args.launched
    return 0 if ended and result["during_save"] and result["with_pending_rollout"] else 1


if __name__ == "__main__":
    sys.exit(main())
