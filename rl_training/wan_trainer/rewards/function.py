"""A reward from a scoring function of the user's own, run in scorer processes with a deadline."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wan_trainer.config.specs import OwnRewardSpec
from wan_trainer.rewards.function_worker import SCORE, FunctionJob
from wan_trainer.rewards.messages import Verdict
from wan_trainer.rewards.pool import START_TIMEOUT_S, ScorerPool, ScorerTimeouts
from wan_trainer.rewards.process import ScorerFailure, ScorerSettings
from wan_trainer.rewards.scratch import Scratch
from wan_trainer.types import RewardRequest, RewardResult, UserError

BODY = "wan_trainer.rewards.function_worker"
THREADS = 1


@dataclass(frozen=True)
class PendingScores:
    """The verdicts of one submission, in its order."""

    requests: tuple[RewardRequest, ...]
    verdicts: tuple[Future[Verdict], ...]

    def result(self) -> list[RewardResult]:
        """Block until every sample has its verdict; see `types.PendingRewards`."""
        return [
            _result(request, verdict.result())
            for request, verdict in zip(self.requests, self.verdicts, strict=True)
        ]


class FunctionReward:
    """`types.Reward` over a function of the frames and the prompt; reward = component "score" = its value.

    A function that raises, hangs, crashes or returns no finite number costs its sample, never the run. key:
    the configuration key that names it. Raises UserError when it cannot be loaded in a scorer process.
    """

    def __init__(self, key: str, spec: OwnRewardSpec, *, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._scratch = Scratch(
            Path(tempfile.gettempdir()) / f"wan-trainer-scorers-{os.getuid()}", keep=False
        )
        settings = ScorerSettings(
            self._scratch.path,
            self._scratch.path,
            THREADS,
            body=BODY,
            arguments=(key, spec.target.path, spec.target.arguments_json),
            # The scorer must find the module where this process found it: the configuration's directory too.
            environment={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        timeouts = ScorerTimeouts(job_s=spec.timeout_s, start_s=start_timeout_s)
        self._pool = ScorerPool(settings, timeouts, workers=spec.workers)
        try:
            self._pool.names()
        except ScorerFailure as failure:
            self.close()
            raise UserError(
                f"{key}: {spec.target}: {failure}; it must also load in a process of its own, without a GPU"
            ) from failure
        except BaseException:
            self.close()
            raise

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingScores:
        """Queue the rollouts, uint8 (N, F, H, W, 3), and return at once; see `types.Reward`."""
        assert videos.dtype == np.uint8 and videos.ndim == 5 and videos.shape[4] == 3, videos.shape
        assert len(videos) == len(requests), (videos.shape, len(requests))
        frames, height, width, channels = videos.shape[1:]
        verdicts = tuple(
            self._pool.submit(FunctionJob((frames, height, width, channels), request.sample.prompt), video)
            for video, request in zip(videos, requests, strict=True)
        )
        return PendingScores(tuple(requests), verdicts)

    def close(self) -> None:
        """End every scorer; open samples become missing. May be called twice."""
        self._pool.close()
        self._scratch.close()


def _result(request: RewardRequest, verdict: Verdict) -> RewardResult:
    reward = verdict.components.get(SCORE, math.nan) if verdict.error is None else math.nan
    return RewardResult(request.id, reward, verdict.components, verdict.error, verdict.started, verdict.ended)
