"""The trainer's side of one scorer process: start it, give it a job, and end it whatever state it is in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe, reduction
from pathlib import Path
from typing import TypeVar

from wan_trainer.rewards.messages import FAREWELL, REPLY_LIMIT, Greeting, Job, Verdict, one_line

POLL_S = 0.2
"""How often a wait looks up: for a cancelled pool, a death that left the pipe open, and the log's size."""

STOP_GRACE_S = 2.0
"""How long an idle scorer may take to leave by itself before it is killed."""

MEMORY_LIMIT = 4 << 30
"""Bytes by which a scorer may have grown since its start; a larger one is replaced after its job."""

LOG_LIMIT = 8 << 20
"""Bytes after which a scorer's log starts again: endless printing must not fill the disk."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)

R = TypeVar("R")


class ScorerFailure(Exception):
    """The scorer gave no verdict: it hung, died, broke the protocol or could not start. One line of text."""


@dataclass(frozen=True)
class ScorerSettings:
    """What scorer processes are started with.

    directory: their working directory. work_dir: holds their logs and temporary files. body: the module to
    run, see `rewards.worker`; arguments: words for it. environment: variables of its own. memory_limit: bytes
    of growth after which a scorer is replaced; at twice as many it is killed with its job.
    """

    directory: Path
    work_dir: Path
    threads: int
    body: str = "wan_trainer.rewards.evaluator_worker"
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    memory_limit: int = MEMORY_LIMIT


def scorer_environment(settings: ScorerSettings) -> dict[str, str]:
    """The environment of a scorer: bounded native threads, no CUDA device, its own temporary directory."""
    environment = dict(os.environ)
    environment.update(dict.fromkeys(THREAD_VARIABLES, str(settings.threads)))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["TMPDIR"] = str(settings.work_dir)
    environment["PYTHONUNBUFFERED"] = "1"  # a killed scorer's last words reach its log
    return {**environment, **settings.environment}


class ScorerProcess:
    """One spawned scorer and the pipe to it; used by one thread, which must outlive it.

    (The kernel's parent-death signal follows the THREAD that started the child.) A plain subprocess rather
    than `multiprocessing`: its spawn would re-import the trainer's main module, torch included, in every
    scorer, and could set neither the environment, the working directory nor the output before the first
    import.
    """

    def __init__(self, settings: ScorerSettings, name: str, cancelled: threading.Event) -> None:
        self._cancelled = cancelled
        self._memory_limit = settings.memory_limit
        self._memory_at_start = 0
        self._log_path = settings.work_dir / f"{name}.log"
        try:
            self._connection, theirs = Pipe()
        except OSError as error:
            raise ScorerFailure(f"the scorer cannot start: {one_line(error)}") from error
        command = [
            sys.executable,
            "-P",
            "-m",
            settings.body,
            str(theirs.fileno()),
            str(os.getpid()),
            *settings.arguments,
        ]
        try:
            with theirs, self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=settings.directory,
                    env=scorer_environment(settings),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # out of reach of the terminal's Ctrl-C; killed as one group
                )
        except OSError as error:
            self._connection.close()
            raise ScorerFailure(f"the scorer cannot start: {one_line(error)}") from error

    @property
    def pid(self) -> int:
        """Process id, also that of its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def greet(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until the body is loaded; what it can score. Raises ScorerFailure."""
        greeting = self._receive(Greeting.decode, timeout_s, "importing it")
        if greeting.error is not None:
            raise ScorerFailure(f"it does not import: {greeting.error}")
        self._memory_at_start = self._memory()
        return greeting.names

    def score(self, job: Job, pixels: int, timeout_s: float) -> Verdict:
        """Score a job whose frames are in the file `pixels`. Raises ScorerFailure: kill the scorer then."""
        self._bound_log()
        try:
            self._connection.send_bytes(job.encode())
            reduction.send_handle(self._connection, pixels, self.pid)
        except OSError:
            raise self._death("before the job") from None
        return self._receive(Verdict.decode, timeout_s, "scoring")

    @property
    def leaking(self) -> bool:
        """Whether it has grown beyond its limit; replace it between two jobs."""
        return self._growth() > self._memory_limit

    def stop(self) -> None:
        """End an idle scorer: it leaves when told, or is killed."""
        # Said, not shown by closing the pipe: a forked data worker may hold a copy of our end.
        with suppress(OSError):
            self._connection.send_bytes(FAREWELL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the scorer and whatever it started, at once. A process the kernel cannot end is left behind."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)

    def _receive(self, decode: Callable[[bytes], R], timeout_s: float, doing: str) -> R:
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ScorerFailure(f"no answer within {timeout_s:g} s while {doing}{self._last_words()}")
            if self._cancelled.is_set():
                raise ScorerFailure("the reward was closed")
            try:
                if self._connection.poll(min(POLL_S, remaining)):
                    return decode(self._connection.recv_bytes(REPLY_LIMIT))
            except (EOFError, OSError):
                raise self._death(f"while {doing}") from None
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ScorerFailure(f"an answer that is no verdict while {doing}") from None
            self._bound_log()
            if self._memory_at_start and self._growth() > 2 * self._memory_limit:
                raise ScorerFailure(f"the scorer grew by {self._growth() >> 20} MiB while {doing}")
            if not self.alive and not self._connection.poll(0):
                raise self._death(f"while {doing}")

    def _death(self, when: str) -> ScorerFailure:
        """How the process ended; its pipe closes a moment before its status can be read."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        if status is None:
            how = "broke its pipe"
        elif status < 0:
            how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
        else:
            how = f"exited with status {status}"
        return ScorerFailure(f"the scorer {how} {when}{self._last_words()}")

    def _last_words(self) -> str:
        lines: list[str] = []
        with suppress(OSError), self._log_path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = log.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"; it last printed: {one_line(last, 120)}" if last else ""

    def _growth(self) -> int:
        return self._memory() - self._memory_at_start

    def _memory(self) -> int:
        """Resident bytes of its own; the mapped frames of a job are shared and not counted."""
        try:
            words = Path(f"/proc/{self.pid}/statm").read_text().split()
            return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):  # it has ended
            return 0

    def _bound_log(self) -> None:
        # The scorer appends, so its next line lands at the new end whatever the size was.
        with suppress(OSError):
            if self._log_path.stat().st_size > LOG_LIMIT:
                os.truncate(self._log_path, 0)
