"""The body of a scorer process that runs a scoring function of the user's own."""

from __future__ import annotations

import inspect
import json
import math
import mmap
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np

from wan_trainer.config.specs import Target
from wan_trainer.rewards.messages import Verdict, one_line
from wan_trainer.rewards.worker import Loaded, finite, serve
from wan_trainer.targets import checked_call, construct, locate
from wan_trainer.types import UserError

SCORE = "score"
FRAMES, PROMPT = "frames", "prompt"


class ScoringFunction(Protocol):
    """What a user writes: the frames of one rollout and its prompt -> a number."""

    def __call__(self, frames: np.ndarray, prompt: str) -> float:
        """frames: uint8 (F, H, W, 3) RGB. A higher number is a better rollout."""
        ...


@dataclass(frozen=True)
class FunctionJob:
    """One rollout for a scoring function. shape: (F, H, W, 3) of its uint8 frames."""

    shape: tuple[int, int, int, int]
    prompt: str
    leftover: None = None

    def encode(self) -> bytes:
        """The job as JSON bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> FunctionJob:
        """The inverse of `encode`."""
        fields = json.loads(data)
        return FunctionJob(tuple(fields["shape"]), fields["prompt"])


def is_scoring_function(key: str, target: Target) -> bool:
    """Whether the target scores single rollouts; otherwise it makes a whole `types.Reward`.

    A function whose first parameter is called `frames` does, and a class with `__call__` and without
    `submit` makes what does. Raises UserError when there is no such target.
    """
    found = locate(key, target)
    if isinstance(found, type):
        has_call = any("__call__" in vars(base) for base in found.__mro__)
        return has_call and not hasattr(found, "submit")
    try:
        named = tuple(inspect.signature(found).parameters)[:2]  # of what a decorator wraps
    except (TypeError, ValueError):
        named = ()  # some callables written in C tell nothing
    if named[:1] != (FRAMES,) and named[1:] == (PROMPT,):
        raise UserError(
            f"{key}: {target.path} takes {', '.join(named)}; call the first parameter {FRAMES}, by which a "
            "scoring function is told from one that makes a whole reward"
        )
    return named[:1] == (FRAMES,)


def scoring_function(key: str, target: Target) -> ScoringFunction:
    """The function of a target that `is_scoring_function`, its keyword arguments bound.

    Raises UserError when it cannot be called with them.
    """
    if isinstance(locate(key, target), type):
        return cast("ScoringFunction", construct(key, target))
    return cast("ScoringFunction", partial(checked_call(key, target, FRAMES, PROMPT), **target.arguments))


def main(arguments: list[str]) -> int:
    """Serve scoring jobs; the exit status."""
    return serve(arguments, _load)


def _load(words: list[str]) -> Loaded:
    key, path, arguments_json = words
    score = scoring_function(key, Target(path, arguments_json))
    return Loaded(lambda message, pixels: _score(score, FunctionJob.decode(message), pixels))


def _score(score: ScoringFunction, job: FunctionJob, pixels: int) -> Verdict:
    with mmap.mmap(pixels, math.prod(job.shape), prot=mmap.PROT_READ) as mapped:
        frames = np.frombuffer(mapped, dtype=np.uint8).reshape(job.shape).copy()
    value = score(frames, job.prompt)
    number = finite(value)
    if number is None:
        return Verdict(error=f"the scoring function returned {one_line(repr(value))}, not a finite number")
    return Verdict(components={SCORE: number})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
