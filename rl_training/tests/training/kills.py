"""Runs whose ranks are killed at a drawn moment, continued, and compared with one that never was.

A moment is an offset into the n-th span of one phase on one rank, so that every phase of a step is reached
whatever the speed of the machine; it comes from a timer thread and is a SIGKILL like any other.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from rl_training.tests.ranks import Ranks, start_ranks
from rl_training.tests.training.runs import MeanColour, rows, run
from wan_trainer.recording.clock import Clock
from wan_trainer.recording.manifest import latest_checkpoint, verify_checkpoint
from wan_trainer.training import session
from wan_trainer.training.checkpoint_writer import CheckpointWriter
from wan_trainer.training.run_lock import RunLock
from wan_trainer.training.scheduler import ReplayScheduler
from wan_trainer.training.stored_state import StoredState
from wan_trainer.types import EXIT_DONE

RANKS = 2
BATCHES, SAVE_STEPS = 6, 2
PARTS = [
    *("--num_epochs", "2", "--save_steps", str(SAVE_STEPS)),
    *("--ema_decay", "0.5", "--keep_checkpoints", "2", "--grpo_sample_batch_size", "1"),
    *("--reduce_dtype", "float32"),
]
COMMON = [*PARTS, "--max_steps", str(BATCHES)]
OVERRIDES = [*PARTS, "--max_off_policy_steps", "1"]
REFL_OVERRIDES = [option for option in PARTS if option not in ("--grpo_sample_batch_size", "1")]
START = "start"
WRITE = "write"
# How long the ranks that are left may take to end, and a start to finish.
TEARDOWN_S, RUN_S = 60.0, 120.0
# What a run measures of its machine.
MEASURED = {"prepare_s", "reward_wait_s", "replay_s", "step_s", "rollouts_per_s", "peak_memory_gib"}


@dataclass(frozen=True)
class Kill:
    """When and whom: `delay_s` after the `occurrence`-th span of `phase` opens on rank `victim`.

    whole: every rank of the job dies at that moment, not the victim alone.
    """

    phase: str
    occurrence: int
    delay_s: float
    victim: int
    whole: bool


class _Killer:
    """The timer of one rank, and what the rank is doing when it goes off."""

    def __init__(self, kill: Kill, scratch: Path) -> None:
        self._kill = kill
        self._scratch = scratch
        self._seen = 0
        self.open: list[str] = []
        self.writing = False
        self.pending: ReplayScheduler[Any, Any, Any] | None = None

    def opened(self, phase: str) -> None:
        """Start the timer when this is the span it waits for."""
        if phase != self._kill.phase:
            return
        self._seen += 1
        if self._seen == self._kill.occurrence:
            timer = threading.Timer(self._kill.delay_s, self._fire)
            timer.daemon = True
            timer.start()

    def _fire(self) -> None:
        pending = 0 if self.pending is None else self.pending.pending
        said = {
            "phase": self.open[-1] if self.open else START if self.pending is None else "between",
            "saving": self.writing or "save" in self.open,
            "pending": pending,
        }
        (self._scratch / "killed.json").write_text(json.dumps(said))
        others = range(RANKS) if self._kill.whole else ()
        for rank in others:
            pid = int((self._scratch / f"pid-{rank}").read_text())
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(killer: _Killer) -> None:
    """Let the run of this process tell `killer` what it does."""

    class WatchedClock(Clock):
        @contextmanager
        def span(self, phase: str, step: int) -> Iterator[None]:
            with super().span(phase, step):
                killer.open.append(phase)
                killer.opened(phase)
                try:
                    yield
                finally:
                    killer.open.pop()

    class WatchedScheduler(ReplayScheduler[Any, Any, Any]):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            killer.pending = self

    store = CheckpointWriter._store

    def watched_store(self: CheckpointWriter, *arguments: Any) -> Path:
        killer.writing = True
        killer.opened(WRITE)
        try:
            return store(self, *arguments)
        finally:
            killer.writing = False

    session.Clock = WatchedClock
    session.ReplayScheduler = WatchedScheduler
    CheckpointWriter._store = watched_store
    killer.opened(START)


def train_rank(recipe: str, output_dir: str, batches: int, kill: Kill | None, scratch: str) -> Any:
    """One start on this rank of a run of `batches`."""
    directory = Path(scratch)
    rank = int(os.environ["RANK"])
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    if kill is not None and kill.whole:
        deadline = time.monotonic() + RUN_S
        while len(list(directory.glob("pid-*"))) < RANKS and time.monotonic() < deadline:
            time.sleep(0.01)
    if kill is not None and kill.victim == rank:
        _watch(_Killer(kill, directory))
    refl = yaml.safe_load(Path(recipe).read_text())["trainer"] == "refl"
    overrides = REFL_OVERRIDES if refl else OVERRIDES
    where = ["--output_dir", output_dir, "--max_steps", str(batches)]
    return run(recipe, [*where, *overrides], MeanColour())


def _train_each(runs: Sequence[tuple[Path, Path]], batches: int, scratch: str) -> list[Any]:
    return [train_rank(str(recipe), str(out), batches, None, scratch) for recipe, out in runs]


def _join(ranks: Ranks, timeout_s: float) -> bool:
    """Whether every rank ended in time; none is left in any case."""
    deadline = time.monotonic() + timeout_s
    for process in ranks.processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in ranks.processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    return not late


def complete_run(recipe: Path, output_dir: Path, scratch: Path) -> None:
    """Start or continue a run and let it end. Raises AssertionError when it does not."""
    complete_runs([(recipe, output_dir)], scratch)


def complete_runs(runs: Sequence[tuple[Path, Path]], scratch: Path, batches: int = BATCHES) -> None:
    """`complete_run` of several recipes and output directories, one after the other in the same processes."""
    scratch.mkdir(parents=True, exist_ok=True)
    ranks = start_ranks(RANKS, _train_each, runs, batches, str(scratch))
    results: list[Any] = []
    for end in ranks.ends:
        results.append(end.recv() if end.poll(RUN_S) else (False, "no answer in time"))
    assert _join(ranks, TEARDOWN_S), "a rank did not end"
    assert results == [(True, [EXIT_DONE] * len(runs))] * RANKS, results


@dataclass(frozen=True)
class Spans:
    """How often each phase opens on each rank of a whole run, and how long it takes at most, seconds."""

    counts: dict[int, Counter[str]]
    longest: dict[str, float]

    @property
    def phases(self) -> list[str]:
        return sorted(self.longest)


def reference_spans(run_dir: Path) -> Spans:
    """The spans of a whole run, and its start as one more phase."""
    counts: dict[int, Counter[str]] = {rank: Counter({START: 1}) for rank in range(RANKS)}
    longest: dict[str, float] = {}
    for row in rows(run_dir, "timeline.jsonl"):
        if row["phase"] != "score":
            counts[row["rank"]][row["phase"]] += 1
            longest[row["phase"]] = max(longest.get(row["phase"], 0.0), row["end"] - row["start"])
    return Spans(counts, {**longest, START: 1.0})


def draw(spans: Spans, index: int, generator: random.Random) -> Kill:
    """The `index`-th kill: phases in turn, everything else at random."""
    victim = generator.randrange(RANKS)
    phase = spans.phases[index % len(spans.phases)]
    return Kill(
        phase=phase,
        occurrence=generator.randint(1, spans.counts[victim][phase]),
        delay_s=generator.random() * spans.longest[phase],
        victim=victim,
        whole=generator.random() < 0.5,
    )


def kill_run(
    recipe: Path, output_dir: Path, kill: Kill, scratch: Path, batches: int = BATCHES
) -> dict[str, Any] | None:
    """Start or continue a run, kill it, and see that nothing is left.

    What the victim was doing when it died, and `from`, the checkpoint that is to be continued from; None
    when the run ended before its moment came. Raises AssertionError when something stays behind.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    for stale in (*scratch.glob("pid-*"), scratch / "killed.json"):
        stale.unlink(missing_ok=True)
    ranks = start_ranks(RANKS, train_rank, str(recipe), str(output_dir), batches, kill, str(scratch))
    ranks.processes[kill.victim].join(RUN_S)
    assert ranks.processes[kill.victim].exitcode is not None, "the run does not end"
    assert _join(ranks, TEARDOWN_S), f"a rank outlived {kill}"
    killed = ranks.processes[kill.victim].exitcode == -signal.SIGKILL
    for end in ranks.ends:
        end.close()
    if not killed:
        return None
    said: dict[str, Any] = json.loads((scratch / "killed.json").read_text())
    RunLock(output_dir).release()
    with socket.socket() as probe:
        # As a server would: connections of the dead that the kernel keeps in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", ranks.port))
    found = latest_checkpoint(output_dir)
    if found is not None:
        verify_checkpoint(found)
    return {**said, **asdict(kill), "from": None if found is None else found.name}


def kill_and_continue(recipe: Path, output_dir: Path, kill: Kill, scratch: Path) -> dict[str, Any] | None:
    """`kill_run`, and continue what was killed to its end."""
    said = kill_run(recipe, output_dir, kill, scratch)
    if said is not None:
        complete_run(recipe, output_dir, scratch)
    return said


def differences(first: Path, second: Path, batches: int = BATCHES) -> list[str]:
    """What differs between two ended runs: tensors, metrics, the sequence of samples and their rewards."""
    found: list[str] = []
    name = f"checkpoint-{batches}"
    states = [StoredState(path / name) for path in (first, second)]
    for section in ("model", "optimizer", "ema"):
        one, other = (state.read(section, state.shapes(section)) for state in states)
        if not one or one.keys() != other.keys():
            found.append(f"{section}: other tensors")
            continue
        found += [f"{section}.{key}" for key in one if not torch.equal(one[key], other[key])]
    for file, left_out in (("metrics.jsonl", MEASURED), ("rewards.jsonl", {"seconds"})):
        one, other = (_without(rows(path, file), left_out) for path in (first, second))
        if not one or one != other:
            found.append(file)
    for path in (first, second):
        verify_checkpoint(path / name)
        if list(path.glob(".partial*")):
            found.append(f"{path.name} holds a partial checkpoint")
    return found


def _without(values: Sequence[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in names} for row in values]
