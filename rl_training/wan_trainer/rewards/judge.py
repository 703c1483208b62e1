"""The judge reward: a vision-language model behind an OpenAI-compatible endpoint scores each rollout."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from wan_trainer.config.specs import VlmRewardSpec
from wan_trainer.rewards.judge_asking import Asker, Judged
from wan_trainer.rewards.judge_client import JudgeClient
from wan_trainer.rewards.judge_rubric import FAILED, SCORE, Rubric, load_rubrics
from wan_trainer.types import RewardRequest, RewardResult, Sample, SampleId, UserError

CLOSE_TIMEOUT_S = 10.0
TRIAL_FRAMES, TRIAL_EDGE = 8, 128
CLOSED = "the reward was closed"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JudgeComposition:
    """How marks become one reward: sum over `weights` of weight x component, each component 0 to 1.

    error_score: reward of a failed verdict as a share of the full mark; None leaves it missing.
    """

    weights: Mapping[str, float]
    score_max: float
    error_score: float | None

    def weigh(self, id_: SampleId, judged: Judged) -> RewardResult:
        """The reward and its components, or what kept the sample from a verdict."""
        error = judged.error
        if judged.marks is not None:
            components = {SCORE: judged.marks.score / self.score_max, **judged.marks.criteria}
            counted = {} if self.error_score is None else {FAILED: 0.0}
        elif self.error_score is not None:
            components = dict.fromkeys([SCORE, *self.weights], self.error_score)
            counted, error = {FAILED: 1.0}, None
        else:
            return RewardResult(id_, math.nan, {}, error, judged.started, judged.ended)
        reward = math.fsum(weight * components[name] for name, weight in self.weights.items())
        return RewardResult(id_, reward, components | counted, error, judged.started, judged.ended)


@dataclass(frozen=True)
class PendingVerdicts:
    """The verdicts of one submission, in its order."""

    requests: tuple[RewardRequest, ...]
    verdicts: tuple[Future[Judged], ...]
    composition: JudgeComposition

    def result(self) -> list[RewardResult]:
        """Block until every sample has its verdict; see `types.PendingRewards`."""
        return [
            self.composition.weigh(request.id, _judged(verdict))
            for request, verdict in zip(self.requests, self.verdicts, strict=True)
        ]


class VlmReward:
    """`types.Reward` over a judge. Components: "score" and the rubric's criteria, each 0 to 1.

    A sample without a verdict is missing (`error` set), never 0, unless `error_score` says otherwise: then
    component "failed" counts it. Requests run in an event loop of their own thread, which can end one at any
    moment; a thread a request could not be ended while a service trickles its answer.

    Raises UserError when the rubrics cannot be used or, with `validate_service`, the service gives no
    verdict.
    """

    def __init__(self, spec: VlmRewardSpec, tasks: Collection[str]) -> None:
        self._spec = spec
        self._rubrics = load_rubrics(spec, tasks)
        share = None if spec.error_score is None else spec.error_score / spec.score_max
        self._composition = JudgeComposition(
            dict(spec.weights or ((SCORE, 1.0),)), score_max=spec.score_max, error_score=share
        )
        self._open: list[Future[Judged]] = []
        self._encoders = ThreadPoolExecutor(spec.concurrency, thread_name_prefix="judge-encode")
        self._client = JudgeClient(spec)
        self._asker = Asker(spec, self._client, self._encoders)
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        try:
            if spec.validate_service and self._rubrics:
                self._validate(next(iter(self._rubrics.values())))
        except BaseException:
            self.close()
            raise
        if spec.error_score is not None:
            _log.warning(
                "vlm_reward_error_score %g: a rollout without a verdict gets it instead of being left out of "
                'its group; component "%s" counts them',
                spec.error_score,
                FAILED,
            )

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingVerdicts:
        """Queue the rollouts and return at once; see `types.Reward`.

        Raises UserError when more than `max_pending_jobs` rollouts would be waiting: blocking here would
        hold up the next rollout.
        """
        assert videos.dtype == np.uint8 and videos.ndim == 5 and videos.shape[4] == 3, (
            videos.dtype,
            videos.shape,
        )
        assert videos.size > 0 and len(videos) == len(requests), (videos.shape, len(requests))
        self._open = [future for future in self._open if not future.done()]
        needed = len(self._open) + len(requests)
        if needed > self._spec.max_pending_jobs:
            raise UserError(
                f"vlm_reward_max_pending_jobs {self._spec.max_pending_jobs} cannot hold the {needed} "
                "rollouts of this rank that await a verdict; set it to rollouts per rank x "
                f"(max_off_policy_steps + 1), at least {needed}"
            )
        verdicts = tuple(self._judge(video, request) for video, request in zip(videos, requests, strict=True))
        self._open += verdicts
        return PendingVerdicts(tuple(requests), verdicts, self._composition)

    def close(self) -> None:
        """End every request; open samples become missing. May be called twice."""
        if self._closed:
            return
        self._closed = True
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with suppress(TimeoutError):
            ending.result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._encoders.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self._loop.close()

    def _judge(self, video: np.ndarray, request: RewardRequest) -> Future[Judged]:
        rubric = self._rubrics.get(request.sample.task)
        problem = CLOSED if self._closed else None
        if rubric is None:  # a task that was not among the dataset's when the run started
            problem = f"there is no rubric for task {request.sample.task}"
        if problem is not None or rubric is None:
            return _answered(Judged(error=problem))
        # A copy: a view would keep the frames of the whole batch until its last verdict.
        return asyncio.run_coroutine_threadsafe(
            self._asker.judge(video.copy(), request.sample, rubric), self._loop
        )

    def _validate(self, rubric: Rubric) -> None:
        """One verdict on a black clip, before anything heavy is loaded."""
        clip = np.zeros((TRIAL_FRAMES, TRIAL_EDGE, TRIAL_EDGE, 3), dtype=np.uint8)
        asker = Asker(replace(self._spec, log_first_n=0), self._client, self._encoders)
        trial = Sample("start of the run", "trial", "Nothing happens.")
        judged = _judged(asyncio.run_coroutine_threadsafe(asker.judge(clip, trial, rubric), self._loop))
        if judged.marks is None:
            raise UserError(
                f"vlm_reward_base_url: {self._spec.base_url} gives no verdict as {self._spec.model}: "
                f"{judged.error}; start the service there (scripts/serve/vllm.fish), look at it with "
                "wan-trainer probe-judge, or mend the address"
            )

    async def _end(self) -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()


def _judged(verdict: Future[Judged]) -> Judged:
    try:
        return verdict.result()
    except CancelledError:
        now = time.monotonic()
        return Judged(error=CLOSED, started=now, ended=now)


def _answered(judged: Judged) -> Future[Judged]:
    """A verdict that needed no judge."""
    now = time.monotonic()
    future: Future[Judged] = Future()
    future.set_result(Judged(judged.marks, judged.error, now, now))
    return future
