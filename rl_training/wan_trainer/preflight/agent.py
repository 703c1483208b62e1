"""torchrun that keeps the exit status of the ranks; the arguments are torchrun's own.

torchrun ends in a traceback and status 1 whenever a rank ends with another status than 0. A rank that refused
its input (2) or stopped after saving (75) has said all there is to say, so this ends with that status and no
traceback; for a rank that died it names the first one, in one line.

    python -m wan_trainer.preflight.agent [torchrun options] --module MODULE [ARGUMENT ...]
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from wan_trainer.types import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, first_line

_TELLING = (EXIT_BAD_INPUT, EXIT_STOPPED)


def launch(arguments: Sequence[str]) -> int:
    """Run torchrun here and return the status of its ranks."""
    # It reports every status but 0 as an error, without the cause; `describe` does that better.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    args = parse_args(list(arguments))
    try:
        run(args)
    except ChildFailedError as error:
        status = status_of([failure.exitcode for failure in error.failures.values()])
        if status not in _TELLING:
            _say(describe(error.failures))
        return status
    except SignalException as error:
        _say(f"ended by {error.sigval.name} before the ranks could save")
        return EXIT_FAILURE
    except DistError as error:
        _say(f"the nodes did not meet at {args.master_addr}:{args.master_port}: {first_line(error)}")
        return EXIT_FAILURE
    return EXIT_DONE


def status_of(exit_codes: Sequence[int]) -> int:
    """2 or 75 when that is how ranks ended and none ended otherwise, 1 in all other cases.

    A rank that torchrun itself ended (a negative SIGTERM) because another one was first does not count.
    """
    codes = {code for code in exit_codes if code != -signal.SIGTERM}
    return codes.pop() if len(codes) == 1 and codes <= set(_TELLING) else EXIT_FAILURE


def describe(failures: Mapping[int, ProcessFailure]) -> str:
    """One line about the rank that failed first."""
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    at = datetime.fromtimestamp(first.timestamp).strftime("%H:%M:%S")
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        hints = {"SIGKILL": " (out of memory?)", "SIGTERM": " before its first batch, with nothing to save"}
        how = f"was ended by {name}{hints.get(name, '')}"
    else:
        how = f"failed with status {first.exitcode}"
    return f"rank {rank} (process {first.pid}) {how} at {at}; its own lines above say why"


def _say(text: str) -> None:
    sys.stderr.write(f"launcher: {text}\n")


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
