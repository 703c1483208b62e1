"""What ended a run, in one line: of all ranks that fail one after the other, the first knows why."""

from __future__ import annotations

from pathlib import Path

from wan_trainer.recording.clock import described
from wan_trainer.types import first_line

FILE = "first_failure.txt"


def clear_failure(output_dir: Path) -> None:
    """Forget the failure of an earlier start; the start that trains now calls it before training."""
    (output_dir / FILE).unlink(missing_ok=True)


def first_failure(output_dir: Path, rank: int, error: BaseException) -> str:
    """The line of the rank that failed first: `error` with rank, phase, step and samples, if this is the one.

    The others fail because it is gone, in whatever collective they were; it has written its line by then.
    """
    reason = f"{type(error).__name__}: {first_line(error)}"
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
