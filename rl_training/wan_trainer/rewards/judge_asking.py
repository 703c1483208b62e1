"""Asking a judge until there is a verdict: attempts, waits, one repair, all within a deadline."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wan_trainer.config.specs import VlmRewardSpec
from wan_trainer.rewards.judge_client import JudgeClient, RequestFailed
from wan_trainer.rewards.judge_request import Message, repair_messages, request_body, rollout_messages
from wan_trainer.rewards.judge_rubric import Rubric
from wan_trainer.rewards.judge_verdict import Marks, Unusable, read_answer
from wan_trainer.rewards.messages import one_line
from wan_trainer.types import Sample, UserError

REPAIRS = 1
"""Repair requests of a sample; a judge that fails twice at the form will fail again."""

LONGEST_WAIT_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """What a judge said about one rollout: marks, or why there are none. Times are `time.monotonic()`."""

    marks: Marks | None = None
    error: str | None = None
    started: float = 0.0
    ended: float = 0.0


@dataclass
class _Attempts:
    """What a sample has used of its attempts, and the last thing that went wrong."""

    failures: int = 0
    repairs: int = 0
    problem: str | None = None


@dataclass
class Asker:
    """Asks one service for verdicts, `spec.concurrency` samples at a time. It lives in one event loop.

    A sample sends at most 1 + max_retries + REPAIRS requests: one more after each failure that may pass, and
    a repair request after an answer that is no verdict.
    """

    spec: VlmRewardSpec
    client: JudgeClient
    encoders: Executor
    _slots: asyncio.Semaphore = field(init=False)
    _logged: int = 0
    # A generator of its own: the global one belongs to the run's seed.
    _jitter: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.spec.concurrency)

    async def judge(self, video: np.ndarray, sample: Sample, rubric: Rubric) -> Judged:
        """The verdict on `video`, uint8 (F, H, W, 3), within timeout_s of its turn; never an exception."""
        async with self._slots:
            started, attempts = time.monotonic(), _Attempts()
            marks: Marks | None = None
            try:
                async with asyncio.timeout(self.spec.timeout_s):
                    marks = await self._converse(video, sample, rubric, attempts)
            except TimeoutError:
                last = f"; before that: {attempts.problem}" if attempts.problem else ""
                attempts.problem = f"no verdict within reward_timeout_s {self.spec.timeout_s:g}{last}"
            except (RequestFailed, Unusable, UserError) as error:
                attempts.problem = str(error)
            except Exception as error:  # noqa: BLE001 - one sample's trouble is one missing reward
                attempts.problem = f"{type(error).__name__}: {error}"
            problem = None if marks is not None else one_line(attempts.problem)
            return Judged(marks, problem, started, time.monotonic())

    async def _converse(
        self, video: np.ndarray, sample: Sample, rubric: Rubric, attempts: _Attempts
    ) -> Marks:
        # Made in its turn: encoded clips of all waiting rollouts would be held at once.
        messages = await asyncio.get_running_loop().run_in_executor(
            self.encoders, rollout_messages, self.spec, rubric, video, sample
        )
        while True:
            answer = await self._answer(rubric, messages, attempts)
            self._show(sample, answer)
            try:
                marks = read_answer(answer, rubric, self.spec.score_max)
            except Unusable as reason:
                attempts.problem = f"the judge's answer cannot be used: {reason}"
                if attempts.repairs >= REPAIRS:
                    raise Unusable(attempts.problem) from None
                attempts.repairs += 1
                messages = [*messages, *repair_messages(answer, str(reason))]
            else:
                return marks

    async def _answer(self, rubric: Rubric, messages: list[Message], attempts: _Attempts) -> str:
        body: dict[str, Any] = request_body(self.spec, rubric, messages)
        while True:
            try:
                return await self.client.complete(body)
            except RequestFailed as failure:
                attempts.failures += 1
                attempts.problem = f"{failure} (request {attempts.failures + attempts.repairs})"
                if not failure.again or attempts.failures > self.spec.max_retries:
                    raise RequestFailed(attempts.problem, again=False) from None
                await asyncio.sleep(self._wait_s(attempts.failures, failure.after_s))

    def _wait_s(self, failures: int, asked_s: float) -> float:
        """Doubling, and spread by half each way: ranks that failed together must not return together."""
        backoff = self.spec.retry_backoff_s * 2.0 ** min(failures - 1, 16)
        return max(asked_s, min(backoff, LONGEST_WAIT_S) * self._jitter.uniform(0.5, 1.5))

    def _show(self, sample: Sample, answer: str) -> None:
        if self._logged < self.spec.log_first_n:
            self._logged += 1
            # A warning, since a run shows no lesser level.
            _log.warning("judge, %s: %s", sample.sample_id, answer)
