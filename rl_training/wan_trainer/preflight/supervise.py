"""Runs torchrun as a child: passes signals on to the ranks and turns the recorded status into its own.

torchrun itself answers a signal by killing every rank after 30 seconds, which is less than one training step,
and turns every way a rank can end into status 1. So torchrun gets a session of its own, a signal goes to the
ranks directly (they stop at a safe point, save and exit 75), and what rank 0 wrote into run.json explains a
failure. A later second signal goes to torchrun, for those who do not want to wait.

    python -m wan_trainer.preflight.supervise --output-dir DIR -- COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from wan_trainer.types import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED

_FORWARDED = (signal.SIGINT, signal.SIGTERM)

_POLL_S = 0.1

# What `training.first_failure` writes; not imported, as that needs torch.
_FAILURE = "first_failure.txt"

_PR_SET_PDEATHSIG = 1

# One request to stop may arrive twice: `timeout`, a terminal and some schedulers signal a process and then
# its whole group.
_ONE_REQUEST_S = 1.0


class TorchrunChild:
    """One torchrun process and the ranks below it."""

    def __init__(self, command: list[str]) -> None:
        # Handlers first: a signal that arrives while torchrun starts is kept and passed on.
        self._arrived: list[int] = []
        self._first_at: float | None = None
        for number in _FORWARDED:
            signal.signal(number, self._note)
        self._process = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_parent)

    def wait(self) -> int:
        """torchrun's own exit status; a child that a signal ended counts as failed."""
        while True:
            # Signals are acted upon here and not in their handler, which another one may interrupt anywhere.
            while self._arrived:
                self._forward(self._arrived.pop(0))
            try:
                return self._process.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)

    def _forward(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        ranks = children(self._process.pid)
        if self._first_at is None and ranks:
            self._first_at = now
            _say(f"{name}: the ranks stop at the next safe point and save; a second signal ends them at once")
            for pid in ranks:
                _signal(pid, number)
        elif self._first_at is None or now - self._first_at > _ONE_REQUEST_S:
            _say(f"{name}: ending the run now")
            _signal(self._process.pid, number)


def children(pid: int) -> list[int]:
    """The direct children of a process, from /proc; empty when it has ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found.extend(int(child) for child in task.read_text(encoding="ascii").split())
        except OSError:  # the thread ended between listing and reading
            continue
    return found


def recorded_status(output_dir: Path) -> int | None:
    """How the newest start in run.json ended; None when there is none or it could not say.

    Not the status of the run: a start that fails before training leaves that of the start before.
    """
    try:
        record = json.loads((output_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    starts = record.get("starts") if isinstance(record, dict) else None
    newest = starts[-1] if isinstance(starts, list) and starts else None
    status = newest.get("exit_status") if isinstance(newest, dict) else None
    return status if isinstance(status, int) else None


def fingerprint(output_dir: Path, name: str = "run.json") -> tuple[int, int, int] | None:
    """Identity of the file that is there now; it changes when a run writes it again."""
    try:
        found = (output_dir / name).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def translate(torchrun_status: int, recorded: int | None) -> int:
    """The launcher's status. A record can explain a failure of the child, never turn it into a success."""
    if torchrun_status in (EXIT_DONE, EXIT_BAD_INPUT, EXIT_STOPPED):
        return torchrun_status
    return recorded if recorded in (EXIT_BAD_INPUT, EXIT_STOPPED) else EXIT_FAILURE


def supervise(command: list[str], output_dir: Path) -> int:
    """Run `command` to its end and return the launcher's exit status."""
    before, failure_before = fingerprint(output_dir), fingerprint(output_dir, _FAILURE)
    status = TorchrunChild(command).wait()
    # A record that nobody touched is that of an earlier run in the same directory.
    recorded = recorded_status(output_dir) if fingerprint(output_dir) != before else None
    ended = translate(status, recorded)
    if ended == EXIT_FAILURE and fingerprint(output_dir, _FAILURE) not in (None, failure_before):
        # Last, below what every rank said of its own end.
        _say(f"the first failure: {(output_dir / _FAILURE).read_text(encoding='utf-8').strip()}")
    return ended


def _die_with_parent() -> None:
    # A launcher that is killed cannot stop anything. Without torchrun its ranks save and stop, see
    # `training.stop`; torchrun itself would give them 30 seconds for that.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _say(text: str) -> None:
    # One write, so that it stays one line between those of the ranks.
    os.write(sys.stderr.fileno(), f"launcher: {text}\n".encode())


def main() -> int:
    """Entry point of the fish launchers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return supervise(command, args.output_dir)


if __name__ == "__main__":
    sys.exit(main())
