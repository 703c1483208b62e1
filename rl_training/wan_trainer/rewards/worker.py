"""A scorer process: imports the external evaluator and scores one rollout at a time.

Run by `wan_trainer.rewards.process` as `python -P -m wan_trainer.rewards.worker FD PARENT_PID` with the
evaluator's checkout as working directory and the environment already set (threads bounded, CUDA hidden),
because native libraries read it when they load. Imports no torch: a scorer starts in a fraction of a second
unless its evaluator needs more. The evaluator is foreign code and may do anything; whatever it does must
end here.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
import numbers
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from wan_trainer.media import prepare_for_evaluation
from wan_trainer.rewards.messages import FAREWELL, Greeting, ScoreJob, Verdict, one_line

PR_SET_PDEATHSIG = 1
EVALUATOR_MODULE = "run_evaluation"
Evaluate = Callable[..., object]


def main(arguments: list[str]) -> int:
    """Serve jobs from the pipe until it closes; the exit status."""
    descriptor, parent = int(arguments[0]), int(arguments[1])
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides: it may still want the rewards in flight
    os.set_inheritable(descriptor, False)  # an evaluator's own children must not hold the pipe open
    connection = Connection(descriptor)
    checkout = os.getcwd()
    sys.path.insert(0, checkout)
    try:
        evaluate, tasks = _load_evaluator()
    except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: every failure is reported
        traceback.print_exc()
        connection.send_bytes(Greeting(error=f"{type(error).__name__}: {one_line(error)}").encode())
        return 1
    connection.send_bytes(Greeting(tasks=tasks).encode())
    while True:
        try:
            message = connection.recv_bytes()
            if message == FAREWELL:
                return 0
            job, pixels = ScoreJob.decode(message), reduction.recv_handle(connection)
        except (EOFError, OSError):
            return 0
        os.chdir(checkout)  # an earlier sample may have left another working directory
        connection.send_bytes(_answer(evaluate, job, pixels).encode())


def read_result(result: object) -> Verdict:
    """Judge what the evaluator returned: a score in [0, 1] and its dimensions, or the reason there is none.

    A swallowed exception comes back as score 0.0 with "error", and a candidate the evaluator could not read
    as a bare 0.0 with `details.video_frame_count` 0: neither is a score. Nothing is clipped. Dimensions
    that are not finite numbers are left out.
    """
    if not isinstance(result, Mapping):
        return Verdict(error=f"the evaluator returned {type(result).__name__}, not a dict")
    if result.get("error"):
        return Verdict(error=f"the evaluator reports: {one_line(result['error'])}")
    details = result.get("details")
    if isinstance(details, Mapping) and "video_frame_count" in details:
        count = _number(details["video_frame_count"])
        if count is None or not count > 0:
            return Verdict(error=f"the evaluator read {one_line(details['video_frame_count'])} frames")
    score = _number(result.get("score"))
    if score is None:
        return Verdict(error=f"the evaluator's score is {one_line(repr(result.get('score')))}, not a number")
    if not 0.0 <= score <= 1.0:  # also false for nan
        return Verdict(error=f"the evaluator's score {score} is not in [0, 1]")
    components = {"score": score}
    dimensions = result.get("dimensions")
    if isinstance(dimensions, Mapping):
        for name, value in dimensions.items():
            number = _number(value)
            if number is not None and math.isfinite(number):
                components.setdefault(str(name), number)
    return Verdict(components=components)


def _load_evaluator() -> tuple[Evaluate, tuple[str, ...]]:
    module = importlib.import_module(EVALUATOR_MODULE)
    evaluate: Evaluate = module.evaluate_single_video
    return evaluate, tuple(str(name) for name in module.TASK_EVALUATOR_MAP)


def _answer(evaluate: Evaluate, job: ScoreJob, pixels: int) -> Verdict:
    """Prepare the video and score it; every failure becomes a verdict."""
    started = time.monotonic()
    try:
        missing = _missing_file(job)
        if missing is not None:
            verdict = Verdict(error=missing)
        else:
            _prepare(job, pixels)
            verdict = read_result(evaluate(job.video_path, job.task, dict(job.gt_info), job.device))
    except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: every failure is a verdict
        traceback.print_exc()
        verdict = Verdict(error=f"{type(error).__name__}: {one_line(error)}", raised=True)
    finally:
        os.close(pixels)
    return replace(verdict, started=started, ended=time.monotonic())


def _missing_file(job: ScoreJob) -> str | None:
    """The evaluator scores a missing ground-truth file 0 without an error, so each is looked for first."""
    for name, value in job.gt_info.items():
        if name == "prompt":
            continue
        for path in [value] if isinstance(value, str) else value:
            if not os.path.isabs(path) or not os.path.exists(path):
                return f"{name} is missing: {one_line(path)}"
    return None


def _prepare(job: ScoreJob, pixels: int) -> None:
    """Write the MP4 the evaluator sees."""
    with mmap.mmap(pixels, math.prod(job.shape), prot=mmap.PROT_READ) as mapped:
        frames = np.frombuffer(mapped, dtype=np.uint8).reshape(job.shape)
        prepare_for_evaluation(
            frames,
            job.fps,
            job.prepared_width,
            job.prepared_height,
            job.prepare_crf,
            job.max_duration_s,
            Path(job.video_path),
            threads=job.threads,
        )
        del frames  # a view keeps the map from closing


def _number(value: Any) -> float | None:
    """`value` as a float when it is a real number (NumPy scalars included) and not a bool."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    return None


def _die_with(parent: int) -> None:
    """Be killed when the parent dies, however it dies; the check covers a death before the call."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
