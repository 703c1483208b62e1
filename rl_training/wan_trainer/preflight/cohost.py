"""Serves a judge beside training: service, probe, training, and the end of every process of the service.

The service gets a session of its own, and what leaves it comes to this process when its parent ends: all that
it starts can be found and ended when training is over, however it is over. A signal during training goes to
training, which saves; before that it ends the start.

    python -m wan_trainer.preflight.cohost --log FILE --health URL --start-timeout SECONDS
        --service-command COMMAND ... --probe-command COMMAND ... --train-command COMMAND ...
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from wan_trainer.types import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILURE, EXIT_INTERRUPTED

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 2.0
_GRACE_S = 15.0
_KILL_WAIT_S = 10.0
_TAIL_LINES, _TAIL_BYTES = 30, 8192
_PARTS = ("--service-command", "--probe-command", "--train-command")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Arrivals:
    """Signals that have arrived and were not dealt with: handlers only take note."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        for number in _HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._note)

    def take(self) -> int | None:
        """The oldest, SIGHUP as SIGTERM; None when there is none."""
        if not self._numbers:
            return None
        number = self._numbers.pop(0)
        return signal.SIGTERM if number == signal.SIGHUP else number

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)


class Service:
    """The judge's process and all that it starts.

    adopted: also what this process inherits (see `adopt_orphans`), which has no other children at the end.
    """

    def __init__(self, command: list[str], log: Path, *, adopted: bool = False) -> None:
        self._log = log
        self._ancestor = os.getpid() if adopted else None
        log.parent.mkdir(parents=True, exist_ok=True)
        # Behind what an earlier start of the run left there.
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def ended(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def show_tail(self) -> None:
        """The last lines of its own part of the log, on standard error."""
        with self._log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._start, file.tell() - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        _say(f"the end of {self._log}:")
        os.write(sys.stderr.fileno(), "".join(f"  {line}\n" for line in lines).encode())

    def stop(self) -> None:
        """End every process of the service: ask, wait, kill. Returns when none is left."""
        for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _KILL_WAIT_S)):
            deadline = time.monotonic() + wait_s
            signalled: set[int] = set()
            while members := self._members():
                # Again in each round: a process may start another while it is asked to end.
                for pid in members - signalled:
                    _signal(pid, number)
                signalled |= members
                if time.monotonic() > deadline:
                    break
                self._process.poll()
                time.sleep(_POLL_S)
            if not members:
                self._process.wait()
                return
        _say(f"the judge's processes {sorted(self._members())} do not end")

    def _members(self) -> set[int]:
        return living(self._process.pid, self._ancestor)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, in place of process 1."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def living(session: int, ancestor: int | None) -> set[int]:
    """Processes of a session, those below `ancestor`, and all below them, zombies aside."""
    facts: dict[int, tuple[int, int, bool]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, parent, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # ended meanwhile
            continue
        facts[int(entry.name)] = (int(parent), int(own), state not in "ZX")
    found = {pid for pid, (parent, own, _) in facts.items() if own == session or parent == ancestor}
    grown = True
    while grown:
        below = {pid for pid, (parent, _, _) in facts.items() if parent in found} - found
        found |= below
        grown = bool(below)
    return {pid for pid in found if facts[pid][2]}


def wait_until_healthy(service: Service, url: str, timeout_s: float, arrivals: Arrivals) -> int:
    """EXIT_DONE when the service answers; another status, and why, when it will not."""
    started = time.monotonic()
    while not _healthy(url):
        if arrivals.take() is not None:
            _say("stopped before the judge was up")
            return EXIT_INTERRUPTED
        if service.ended is not None:
            _say(f"the judge's service ended with status {service.ended} before it was up")
            service.show_tail()
            return EXIT_FAILURE
        if time.monotonic() - started > timeout_s:
            _say(
                f"the judge's service does not answer at {url} after {timeout_s:g} s; raise "
                "WAN_TRAINER_VLM_START_TIMEOUT_S if it is only slow"
            )
            service.show_tail()
            return EXIT_FAILURE
        time.sleep(_POLL_S)
    _say(f"the judge is up after {time.monotonic() - started:.0f} s")
    return EXIT_DONE


def run_probe(service: Service, command: list[str], arrivals: Arrivals) -> int:
    """EXIT_DONE when the judge gives verdicts."""
    stopped = False

    def end(process: subprocess.Popen[bytes], _: int) -> None:
        nonlocal stopped
        stopped = True
        _signal(process.pid, signal.SIGTERM)

    status = _run(command, arrivals, end)
    if stopped or arrivals.take() is not None:
        _say("stopped before training began")
        return EXIT_INTERRUPTED
    if status != EXIT_DONE:
        _say(f"the judge did not pass its probe (status {status}): training was not started")
        service.show_tail()
    return status if status in (EXIT_DONE, EXIT_BAD_INPUT) else EXIT_FAILURE


def run_training(service: Service, command: list[str], arrivals: Arrivals) -> int:
    """The status of training; a failure when the service ended under it."""
    lost = False

    def watch(process: subprocess.Popen[bytes]) -> None:
        nonlocal lost
        if service.ended is not None and not lost:
            lost = True
            _say(f"the judge's service ended with status {service.ended}: training saves and stops")
            service.show_tail()
            _signal(process.pid, signal.SIGTERM)

    status = _run(command, arrivals, lambda process, number: _signal(process.pid, number), watch)
    return EXIT_FAILURE if lost and status != EXIT_DONE else status


def _run(
    command: list[str],
    arrivals: Arrivals,
    on_signal: Callable[[subprocess.Popen[bytes], int], None],
    watch: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> int:
    process = subprocess.Popen(command)
    while True:
        number = arrivals.take()
        if number is not None:
            on_signal(process, number)
        if watch is not None:
            watch(process)
        try:
            status = process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        return status if status >= 0 else EXIT_FAILURE


def _healthy(url: str) -> bool:
    # Never through a proxy of the environment: the service is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_HEALTH_TIMEOUT_S) as response:
            return response.status == 200
    except (OSError, HTTPException, urllib.error.URLError):
        return False


def _is_taken(url: str) -> bool:
    place = urlsplit(url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place.hostname, place.port))
        except OSError:
            return True
    return False


def _die_with_parent() -> None:
    # A launcher that is killed cannot stop anything; the kernel then asks the service to end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _say(text: str) -> None:
    # One write, so that it stays one line between those of the ranks.
    os.write(sys.stderr.fileno(), f"launcher: {text}\n".encode())


def split_commands(arguments: list[str]) -> tuple[list[str], list[list[str]]]:
    """Own arguments, then the three commands that follow their markers; each ends where the next begins."""
    places = [arguments.index(part) for part in _PARTS]
    bounds = [*places, len(arguments)]
    commands = [arguments[begin + 1 : end] for begin, end in pairwise(bounds)]
    return arguments[: places[0]], commands


def main() -> int:
    """Entry point of the fish launcher."""
    own, (service_command, probe_command, train_command) = split_commands(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--health", required=True)
    parser.add_argument("--start-timeout", type=float, required=True)
    args = parser.parse_args(own)
    if _is_taken(args.health):
        _say(
            f"the port of {args.health} is taken on this machine: set WAN_TRAINER_VLM_PORT, or "
            "WAN_TRAINER_VLM_START_SERVICE=0 to use the service that is there"
        )
        return EXIT_BAD_INPUT
    arrivals = Arrivals()
    _say(f"starting the judge's service, which writes {args.log}")
    adopt_orphans()
    service = Service(service_command, args.log, adopted=True)
    try:
        status = wait_until_healthy(service, args.health, args.start_timeout, arrivals)
        if status == EXIT_DONE:
            status = run_probe(service, probe_command, arrivals)
        if status == EXIT_DONE and arrivals.take() is not None:
            _say("stopped before training began")
            status = EXIT_INTERRUPTED
        if status == EXIT_DONE:
            status = run_training(service, train_command, arrivals)
        return status
    finally:
        service.stop()
        _say("the judge's service is stopped")


if __name__ == "__main__":
    sys.exit(main())
