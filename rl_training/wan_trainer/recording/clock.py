"""Named time spans of one rank: what every phase of a step took, and when.

The clock is torch-free and measures the host. A phase that only queues work on an accelerator ends, for the
clock, when its call returns; the phases of a step end in copies to the CPU, which wait for that work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_NOTE = "wan_trainer: "


_SAMPLES = "wan_trainer samples: "


@contextmanager
def naming(samples: Iterable[str]) -> Iterator[None]:
    """An exception that leaves the block gets a note with these sample ids, from the innermost block only."""
    try:
        yield
    except BaseException as error:
        if not any(note.startswith(_SAMPLES) for note in getattr(error, "__notes__", ())):
            error.add_note(_SAMPLES + ", ".join(dict.fromkeys(samples)))
        raise


def described(error: BaseException) -> str:
    """What the notes of spans and samples say of an exception, in one line; empty without any."""
    notes: list[str] = getattr(error, "__notes__", [])
    places = [note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)]
    samples = [f"samples {note.removeprefix(_SAMPLES)}" for note in notes if note.startswith(_SAMPLES)]
    return ", ".join([*places, *samples])


class Span(NamedTuple):
    """One phase of one rank: `start` and `end` in seconds since the epoch, `step` the batch's position."""

    rank: int
    phase: str
    step: int
    start: float
    end: float


class Clock:
    """Collects spans. Safe to use from several threads; nesting is allowed and each level is its own span.

    Durations come from the monotonic clock, which is common to all processes of a machine. The offset to wall
    time is taken once per clock, so a wall clock that is set back in the middle of a run moves no span.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._offset = time.time() - time.monotonic()
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, phase: str, step: int) -> Iterator[None]:
        """Time the block as `phase` of batch `step`, whether it ends normally or raises.

        An exception that leaves the block gets a note with rank, phase and step, from the innermost span
        only: the traceback then says where in the run it happened.
        """
        start = time.monotonic()
        try:
            yield
        except BaseException as error:
            if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
                error.add_note(f"{_NOTE}rank {self.rank}, phase {phase}, step {step}")
            raise
        finally:
            self.add(phase, step, start, time.monotonic())

    def add(self, phase: str, step: int, started: float, ended: float) -> None:
        """Record a span timed with `time.monotonic()` elsewhere on this machine, in a scorer process say."""
        span = Span(self.rank, phase, step, started + self._offset, ended + self._offset)
        with self._lock:
            self._spans.append(span)

    def drain(self) -> list[Span]:
        """The spans that ended since the last call, in the order they ended."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans
