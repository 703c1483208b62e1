"""A pool of scorer processes in which a broken scorer costs its sample and nothing else.

`concurrent.futures.ProcessPoolExecutor` (and loky, and `multiprocessing.Pool`) cannot end one hung worker:
a killed worker breaks the whole executor or loses its task silently, and a deadline would count the time in
the queue. Here each scorer has its own pipe and its own thread, which gives it one job at a time, waits
until that job's deadline, kills and replaces it when it must, and tries the job once more.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from wan_trainer.rewards.messages import Job, Verdict, one_line
from wan_trainer.rewards.process import ScorerFailure, ScorerProcess, ScorerSettings

ATTEMPTS = 2
START_TIMEOUT_S = 180.0
"""How long an evaluator may take to import; OCR and detection libraries on a network disk take their time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScorerTimeouts:
    """job_s bounds one try at a job, counted from when a scorer gets it; start_s bounds a scorer's start."""

    job_s: float
    start_s: float = START_TIMEOUT_S


@dataclass(frozen=True)
class _Pending:
    """A queued job. The pixels live in an anonymous memory file: nothing of it outlives the processes."""

    job: Job
    pixels: int
    keep_video: bool
    future: Future[Verdict] = field(default_factory=Future[Verdict])


class ScorerPool:
    """`workers` scorer processes, started at once and kept warm.

    keep_videos leaves the prepared MP4s where the jobs put them.
    """

    def __init__(
        self, settings: ScorerSettings, timeouts: ScorerTimeouts, *, workers: int, keep_videos: bool = False
    ) -> None:
        assert workers >= 1, workers
        self._keep_videos = keep_videos
        self._jobs: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._names: Future[tuple[str, ...]] = Future()
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._lanes = [
            _Lane(
                f"scorer-{index}", settings, timeouts, self._jobs, self._closed, self._first_start, self._say
            )
            for index in range(workers)
        ]
        for lane in self._lanes:
            lane.thread.start()

    def names(self) -> tuple[str, ...]:
        """What the scorers can score, once the first one is up. Raises ScorerFailure if it fails."""
        return self._names.result()

    def submit(self, job: Job, frames: np.ndarray) -> Future[Verdict]:
        """Queue a job, copying `frames`, and return at once. The future never raises: it holds a verdict."""
        assert not self._closed.is_set(), "submit after close"
        try:
            pending = _Pending(job, _memory_file(frames), self._keep_videos)
        except OSError as error:
            failed: Future[Verdict] = Future()
            failed.set_result(_failure(f"the frames cannot be queued: {one_line(error)}", time.monotonic()))
            return failed
        self._jobs.put(pending)
        return pending.future

    def close(self) -> None:
        """Kill busy scorers, end idle ones, answer every open job as failed. May be called twice."""
        self._closed.set()
        for _ in self._lanes:
            self._jobs.put(None)
        for lane in self._lanes:
            lane.thread.join()
        with suppress(queue.Empty):
            while True:
                pending = self._jobs.get_nowait()
                if pending is not None:
                    os.close(pending.pixels)
                    pending.future.set_result(_failure("the reward was closed", time.monotonic()))

    def _say(self, line: str) -> None:
        """Log a line once, whichever scorers it comes from."""
        with self._lock:
            known = line in self._said
            self._said.add(line)
        if not known:
            _log.warning("%s", line)

    def _first_start(self, outcome: tuple[str, ...] | ScorerFailure) -> None:
        """The first scorer to come up, or to fail, answers `names`."""
        with self._lock:
            if self._names.done():
                return
            if isinstance(outcome, ScorerFailure):
                self._names.set_exception(outcome)
            else:
                self._names.set_result(outcome)


class _Lane:
    """One place in the pool: the scorer that holds it now, and the thread that feeds it."""

    def __init__(
        self,
        name: str,
        settings: ScorerSettings,
        timeouts: ScorerTimeouts,
        jobs: queue.SimpleQueue[_Pending | None],
        closed: threading.Event,
        report_start: Callable[[tuple[str, ...] | ScorerFailure], None],
        say: Callable[[str], None],
    ) -> None:
        self._name = name
        self._settings = settings
        self._timeouts = timeouts
        self._jobs = jobs
        self._closed = closed
        self._report_start = report_start
        self._say = say
        self._scorer: ScorerProcess | None = None
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def _serve(self) -> None:
        """One job at a time until the pool closes."""
        with suppress(ScorerFailure):  # reported; the next job tries again
            self._ensure_scorer()
        while (pending := self._jobs.get()) is not None:
            try:
                verdict = self._run(pending)
            except Exception as error:  # noqa: BLE001  an unanswered future would stop the training for good
                _log.exception("%s failed", self._name)
                verdict = _failure(f"{type(error).__name__}: {one_line(error)}", time.monotonic())
                self._drop_scorer()
            os.close(pending.pixels)
            pending.future.set_result(verdict)
        if self._scorer is not None:
            self._scorer.stop()

    def _run(self, pending: _Pending) -> Verdict:
        """Score one job in at most ATTEMPTS tries."""
        started = time.monotonic()
        verdict = _failure("the reward was closed", started)
        for _ in range(ATTEMPTS):
            if self._closed.is_set():
                break
            try:
                verdict = self._ensure_scorer().score(pending.job, pending.pixels, self._timeouts.job_s)
            except ScorerFailure as failure:
                verdict = _failure(str(failure), started)
                self._drop_scorer()
            else:
                self._after_job()
                # An evaluator's answer stands, even a bad one: it would be the same again.
                if not verdict.raised:
                    break
            finally:
                if not pending.keep_video and pending.job.leftover is not None:
                    pending.job.leftover.unlink(missing_ok=True)
        return verdict

    def _after_job(self) -> None:
        if self._scorer is not None and self._scorer.leaking:
            self._say("a scorer grew too large and was replaced; something in it leaks memory")
            self._drop_scorer()

    def _ensure_scorer(self) -> ScorerProcess:
        if self._scorer is not None and self._scorer.alive:
            return self._scorer
        self._drop_scorer()
        try:
            self._scorer = ScorerProcess(self._settings, self._name, self._closed)
            names = self._scorer.greet(self._timeouts.start_s)
        except ScorerFailure as failure:
            self._drop_scorer()
            self._report_start(failure)
            raise
        self._report_start(names)
        return self._scorer

    def _drop_scorer(self) -> None:
        if self._scorer is not None:
            self._scorer.kill()
            self._scorer = None


def _failure(error: str, started: float) -> Verdict:
    return Verdict(error=error, started=started, ended=time.monotonic())


def _memory_file(frames: np.ndarray) -> int:
    """An anonymous file with the bytes of `frames`; it needs no /dev/shm, which containers keep tiny."""
    descriptor = os.memfd_create("rollout", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", buffering=0, closefd=False) as target:
            remaining = memoryview(np.ascontiguousarray(frames)).cast("B")
            while remaining:  # one write moves at most 2 GiB
                remaining = remaining[target.write(remaining) :]
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
