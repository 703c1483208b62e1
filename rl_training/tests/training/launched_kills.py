"""Runs of the real launcher, with scorers and data workers, that are killed from outside and continued.

On-policy: ranks whose torchrun is killed save where they are. With a delay that would empty the queue where
the uninterrupted run does not, and the two would differ as they should.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rl_training.tests.training.kills import COMMON, RANKS, RUN_S, TEARDOWN_S
from rl_training.tests.training.runs import rows
from wan_trainer.preflight.network import free_port
from wan_trainer.preflight.supervise import children
from wan_trainer.recording.manifest import latest_checkpoint, verify_checkpoint
from wan_trainer.training.run_lock import RunLock
from wan_trainer.types import UserError

LAUNCHER = Path(__file__).resolve().parents[3] / "scripts" / "train" / "grpo_multinode.fish"
_MARK = "WAN_TRAINER_TEST_JOB"

# What a recipe for ranks with a stand-in reward lacks.
REAL_PARTS: dict[str, object] = {
    "num_workers": 1,
    "vbvr_reward_fps": 16,
    "vbvr_reward_cpu_workers": 1,
    "vbvr_reward_cpu_threads_per_worker": 1,
    "vbvr_reward_prepared_width": 64,
    "vbvr_reward_prepared_height": 64,
}


@dataclass
class Job:
    """A launcher and all that descends from it, which carries a mark in its environment."""

    recipe: Path
    output_dir: Path
    log: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    port: int = field(default_factory=free_port)

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The launcher, which is gone with everything it started when the block ends."""
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "WAN_TRAINER_PYTHON")
        kept = {name: value for name, value in os.environ.items() if name not in names}
        command = ["fish", str(LAUNCHER), "--nproc", str(RANKS), "--config", str(self.recipe)]
        with self.log.open("ab") as log:
            launcher = subprocess.Popen(
                [*command, "--output_dir", str(self.output_dir), *COMMON],
                env={**kept, "MASTER_PORT": str(self.port), _MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield launcher
        finally:
            for pid in [launcher.pid, *self.processes()]:
                _kill(pid)
            launcher.wait()

    def processes(self) -> list[int]:
        """All that runs of this job; what it started and nobody ended is among them."""
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{_MARK}={self.mark}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it ended meanwhile, or is not ours
                continue
        return found

    def ranks(self, launcher: subprocess.Popen[bytes]) -> list[int]:
        """The ranks; none before torchrun has started them."""
        return [rank for torchrun in children(launcher.pid) for rank in children(torchrun)]

    def complete(self) -> None:
        """Start or continue the run and let it end."""
        with self.started() as launcher:
            status = launcher.wait(RUN_S)
            assert status == 0, f"status {status}, see {self.log}"
            self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Raises AssertionError when processes of the job or its lock outlive it by long. A data worker looks
        for its parent every few seconds."""
        deadline = time.monotonic() + TEARDOWN_S
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)
        # A dying process shows no environment any more and closes its files a moment later.
        while not _is_free(self.output_dir):
            assert time.monotonic() < deadline, "the lock is held"
            time.sleep(0.1)


def training_s(run_dir: Path) -> float:
    """From the first span of a whole run to its last, seconds."""
    spans = rows(run_dir, "timeline.jsonl")
    return max(span["end"] for span in spans) - min(span["start"] for span in spans)


def kill_and_continue(job: Job, length_s: float, generator: random.Random) -> str | None:
    """Kill one rank, torchrun or the whole job while it trains, and continue it; who it was.

    None when the run ended before. length_s: how long a run trains once all is loaded. Raises AssertionError
    when something of the job stays behind.
    """
    who = generator.choice(("one rank", "torchrun", "the whole job"))
    with job.started() as launcher:
        deadline = time.monotonic() + RUN_S
        while not (job.output_dir / "run.json").exists():  # written when everything is loaded
            assert time.monotonic() < deadline and launcher.poll() is None, (
                f"it does not start, see {job.log}"
            )
            time.sleep(0.02)
        time.sleep(generator.random() * length_s)
        ranks = job.ranks(launcher)
        if len(ranks) < RANKS:
            return None
        victims = {
            "one rank": [generator.choice(ranks)],
            "torchrun": children(launcher.pid),
            "the whole job": job.processes(),
        }
        for pid in victims[who]:
            _kill(pid)
        launcher.wait(TEARDOWN_S)
        job.assert_nothing_left()
    found = latest_checkpoint(job.output_dir)
    if found is not None:
        verify_checkpoint(found)
    # On the same port: it is free again.
    job.complete()
    return who


def _is_free(output_dir: Path) -> bool:
    try:
        RunLock(output_dir).release()
    except UserError:
        return False
    return True


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
