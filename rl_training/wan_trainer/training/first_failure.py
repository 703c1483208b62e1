"""What ended a run, in one line: of all ranks that fail one after the other, the first knows why."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from wan_trainer.recording.clock import described
from wan_trainer.types import first_line

FILE = "first_failure.txt"

# What gloo says when the process at the other end is gone, or had a failure of its own.
_GLOO_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Socket closed")


def clear_failure(output_dir: Path) -> None:
    """Forget the failure of an earlier start: a start does it when it has the lock, before it can fail."""
    (output_dir / FILE).unlink(missing_ok=True)


def first_failure(output_dir: Path, rank: int, error: BaseException) -> str:
    """The line of the rank that failed first: `error` with rank, phase, step and samples, if this is the one.

    The others fail because it is gone, in whatever collective they were; it has written its line by then. A
    rank that was killed has not: the first that misses it says so.
    """
    reason = f"{type(error).__name__}: {first_line(error)}"
    if lost_peer(error):
        reason = "a rank ended without a word (was it killed, or out of memory?), and this one missed it"
    where = described(error)
    line = f"{reason} ({where})" if where else f"{reason} (rank {rank})"
    try:
        with (output_dir / FILE).open("x", encoding="utf-8") as file:
            file.write(line + "\n")
    except FileExistsError:
        return (output_dir / FILE).read_text(encoding="utf-8").strip() or line
    except OSError:
        # A full or vanished disk may be what failed.
        return line
    return line


def lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone, in a collective or a save that waited for it."""
    if isinstance(error, CheckpointException):
        return all(lost_peer(failure) for failure, _ in error.failures.values())
    if error.__cause__ is not None and lost_peer(error.__cause__):
        return True
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and any(words in text for words in _GLOO_LOST)
