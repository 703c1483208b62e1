"""A reward: how strong one colour is at the end of a rollout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from wan_trainer.types import RewardRequest, RewardResult

CHANNELS = ("red", "green", "blue")


@dataclass(frozen=True)
class Pending:
    """Verdicts that are being computed."""

    scores: Sequence[Future[RewardResult]]

    def result(self) -> list[RewardResult]:
        """Wait for all of them, in the order of the submission."""
        return [score.result() for score in self.scores]


class ColourReward:
    """The mean of one channel over the last frame, from 0 to 1."""

    def __init__(self, tasks: Sequence[str], channel: str, threads: int = 1) -> None:
        if channel not in CHANNELS:
            raise ValueError(f"channel is {channel}; it must be one of {', '.join(CHANNELS)}")
        self.tasks = tasks
        self._channel = CHANNELS.index(channel)
        self._pool = ThreadPoolExecutor(threads)

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> Pending:
        """uint8 (N, F, H, W, 3), one request a row; returns at once, so that the next rollout can start."""
        # The trainer reuses nothing of `videos`, but only the last frames are worth keeping until then.
        return Pending(
            [
                self._pool.submit(self._score, request, video[-1].copy())
                for request, video in zip(requests, videos, strict=True)
            ]
        )

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _score(self, request: RewardRequest, frame: np.ndarray) -> RewardResult:
        # What goes wrong here is a missing reward, which is counted, never an exception.
        started = time.monotonic()
        try:
            score = float(frame[..., self._channel].mean()) / 255
        except (ValueError, IndexError) as error:
            return RewardResult(request.id, float("nan"), error=str(error))
        return RewardResult(request.id, score, {"colour": score}, started=started, ended=time.monotonic())
