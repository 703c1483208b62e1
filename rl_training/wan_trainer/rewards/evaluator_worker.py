"""The body of a scorer process that runs the external evaluator: one rollout at a time.

Run by `wan_trainer.rewards.process` with the evaluator's checkout as working directory and the environment
already set (threads bounded, CUDA hidden), because native libraries read it when they load. Imports no torch:
a scorer starts in a fraction of a second unless its evaluator needs more.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from wan_trainer.media import prepare_for_evaluation
from wan_trainer.rewards.fast_decode import FastLoader, install
from wan_trainer.rewards.messages import ScoreJob, Verdict, one_line
from wan_trainer.rewards.worker import Loaded, finite, real_number, serve

EVALUATOR_MODULE = "run_evaluation"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FAST_DECODE = "fast-decode"
"""Argument: read videos from start to end, see `rewards.fast_decode`."""

Evaluate = Callable[..., object]


def main(arguments: list[str]) -> int:
    """Serve scoring jobs; the exit status."""
    return serve(arguments, lambda words: _load_evaluator(fast_decode=FAST_DECODE in words))


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
        count = real_number(details["video_frame_count"])
        if count is None or not count > 0:
            return Verdict(error=f"the evaluator read {one_line(details['video_frame_count'])} frames")
    score = real_number(result.get("score"))
    if score is None:
        return Verdict(error=f"the evaluator's score is {one_line(repr(result.get('score')))}, not a number")
    if not 0.0 <= score <= 1.0:  # also false for nan
        return Verdict(error=f"the evaluator's score {score} is not in [0, 1]")
    components = {"score": score}
    dimensions = result.get("dimensions")
    if isinstance(dimensions, Mapping):
        for name, value in dimensions.items():
            number = finite(value)
            if number is not None:
                components.setdefault(str(name), number)
    return Verdict(components=components)


def _load_evaluator(*, fast_decode: bool) -> Loaded:
    sys.addaudithook(_refuse_network)
    module = importlib.import_module(EVALUATOR_MODULE)
    evaluate: Evaluate = module.evaluate_single_video
    names = tuple(str(name) for name in module.TASK_EVALUATOR_MAP)
    loader = install() if fast_decode else None
    return Loaded(lambda message, pixels: _score(evaluate, loader, message, pixels), names)


def _refuse_network(event: str, details: tuple[object, ...]) -> None:
    """A library that misses a model file goes and fetches it: a reward must not depend on what it finds."""
    if event == "socket.getaddrinfo":
        host = details[0]
    elif event == "socket.connect" and isinstance(details[1], tuple):
        host = details[1][0]
    else:
        return
    if host is not None and str(host) not in LOOPBACK:
        raise OSError(
            f"the evaluator asked for {one_line(host, 80)}; scorers work offline, put its files here"
        )


def _score(evaluate: Evaluate, loader: FastLoader | None, message: bytes, pixels: int) -> Verdict:
    """Prepare the video and score it."""
    job = ScoreJob.decode(message)
    if loader is not None:
        loader.candidate = job.video_path
    missing = _missing_file(job)
    if missing is not None:
        return Verdict(error=missing)
    _prepare(job, pixels)
    return read_result(evaluate(job.video_path, job.task, dict(job.gt_info), job.device))


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
