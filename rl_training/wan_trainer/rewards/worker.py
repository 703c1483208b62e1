"""A scorer process: serves jobs from a pipe, one at a time, with whatever body it was started with.

A body is foreign code (an external evaluator, a user's function) and may do anything: whatever it does must
end here as a verdict.
"""

from __future__ import annotations

import ctypes
import math
import numbers
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from wan_trainer.rewards.messages import FAREWELL, Greeting, Verdict, one_line

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Loaded:
    """A body that is ready.

    score: the encoded job and the descriptor of its pixels -> the verdict; what it raises becomes one.
    names: what it can score, for its greeting.
    """

    score: Callable[[bytes, int], Verdict]
    names: tuple[str, ...] = ()


def serve(arguments: list[str], load: Callable[[list[str]], Loaded]) -> int:
    """Serve jobs from the pipe until it closes; the exit status.

    arguments: pipe descriptor, process id of the parent, and the words that `load` gets.
    """
    descriptor, parent = int(arguments[0]), int(arguments[1])
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides: it may still want the rewards in flight
    os.set_inheritable(descriptor, False)  # a body's own children must not hold the pipe open
    connection, own = Connection(descriptor), os.getpid()

    def say(message: Greeting | Verdict) -> None:
        if os.getpid() != own:
            os._exit(0)  # a fork of the body came back: a second verdict would be taken for the next job's
        connection.send_bytes(message.encode())

    directory = os.getcwd()
    sys.path.insert(0, directory)
    try:
        loaded = load(arguments[2:])
    except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: every failure is reported
        traceback.print_exc()
        say(Greeting(error=f"{type(error).__name__}: {one_line(error)}"))
        return 1
    say(Greeting(names=loaded.names))
    while True:
        try:
            message = connection.recv_bytes()
            if message == FAREWELL:
                return 0
            pixels = reduction.recv_handle(connection)
        except (EOFError, OSError):
            return 0
        os.chdir(directory)  # an earlier sample may have left another working directory
        say(_answer(loaded, message, pixels))


def _answer(loaded: Loaded, job: bytes, pixels: int) -> Verdict:
    started = time.monotonic()
    try:
        verdict = loaded.score(job, pixels)
    except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: every failure is a verdict
        traceback.print_exc()
        verdict = Verdict(error=f"{type(error).__name__}: {one_line(error)}", raised=True)
    finally:
        os.close(pixels)
    return replace(verdict, started=started, ended=time.monotonic())


def real_number(value: Any) -> float | None:
    """`value` as a float when it is a real number (NumPy scalars included) and not a bool."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    return None


def finite(value: Any) -> float | None:
    """`real_number`, when it is finite."""
    number = real_number(value)
    return number if number is not None and math.isfinite(number) else None


def _die_with(parent: int) -> None:
    """Be killed when the parent dies, however it dies; the check covers a death before the call."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
