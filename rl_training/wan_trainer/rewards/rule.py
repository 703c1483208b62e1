"""The rule reward: an external evaluator scores each rollout's video in a pool of spawned processes."""

from __future__ import annotations

import logging
import math
import os
import resource
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from wan_trainer.config.specs import RuleRewardSpec
from wan_trainer.rewards.evalkit import (
    check_checkout,
    evaluator_settings,
    match_tasks,
    missing_ocr_models,
    unsupported_message,
    unusable,
)
from wan_trainer.rewards.messages import ScoreJob, Verdict
from wan_trainer.rewards.pool import START_TIMEOUT_S, ScorerPool, ScorerTimeouts
from wan_trainer.rewards.process import ScorerFailure
from wan_trainer.rewards.scratch import Scratch
from wan_trainer.types import RewardRequest, RewardResult, Sample, SampleId, UserError

_log = logging.getLogger(__name__)

OTHER_DESCRIPTORS = 512
"""Open files that the rest of the trainer may need."""

SCORE = "score"
UNSUPPORTED = "unsupported"
"""Component: 1.0 for a sample whose task the evaluator cannot score, 0.0 for the others of such a run."""


@dataclass(frozen=True)
class Composition:
    """How a verdict's components become one reward.

    mean_of_dimensions: "score" becomes the mean of the evaluator's dimensions instead of its task-specific
    score. flag_unsupported: some task of the run has no scorer, so every sample says whether its task has.
    """

    weights: Mapping[str, float]
    mean_of_dimensions: bool
    flag_unsupported: bool

    def weigh(self, id_: SampleId, verdict: Verdict) -> RewardResult:
        """The weighted sum of the components, or what is wrong with one that carries a weight."""
        components = dict(verdict.components)
        if self.mean_of_dimensions and UNSUPPORTED not in components:
            components.pop(SCORE, None)
            if components:
                components[SCORE] = math.fsum(components.values()) / len(components)
        reward, error = math.nan, verdict.error
        if error is None:
            error = self._problem(components)
        if error is None:
            reward = math.fsum(weight * components[name] for name, weight in self.weights.items())
            if self.flag_unsupported:
                components.setdefault(UNSUPPORTED, 0.0)
        return RewardResult(id_, reward, components, error, verdict.started, verdict.ended)

    def _problem(self, components: Mapping[str, float]) -> str | None:
        for name in self.weights:
            if name not in components:
                given = ", ".join(sorted(components)) or "no dimension"
                return f"reward component {name} is missing; the evaluator gave {given}"
            if not 0.0 <= components[name] <= 1.0:
                return f"reward component {name} {components[name]} is not in [0, 1]"
        return None


@dataclass(frozen=True)
class PendingRuleRewards:
    """The verdicts of one submission, in its order."""

    requests: tuple[RewardRequest, ...]
    verdicts: tuple[Future[Verdict], ...]
    composition: Composition

    def result(self) -> list[RewardResult]:
        """Block until every sample has its verdict; see `types.PendingRewards`."""
        return [
            self.composition.weigh(request.id, verdict.result())
            for request, verdict in zip(self.requests, self.verdicts, strict=True)
        ]


class RuleReward:
    """`types.Reward` over an external evaluator checkout.

    reward = sum over `spec.weights` of weight x component; the components are the evaluator's score
    ("score") and its dimensions by name. A sample without a trustworthy score is missing (`error` set),
    never 0.

    Raises UserError when the checkout is not the pinned one, the evaluator does not import, or a task of
    `tasks` has no scorer and no `unsupported_score` is given.
    """

    def __init__(
        self, spec: RuleRewardSpec, tasks: Collection[str], *, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        _check(spec)
        _reserve_descriptors(spec.max_pending_jobs)
        self._spec = spec
        self._open: list[Future[Verdict]] = []
        self._serial = 0
        self._scratch = Scratch(spec.tmp_dir, keep=spec.keep_tmp)
        self._pool = ScorerPool(
            evaluator_settings(
                spec.evalkit_dir,
                self._scratch.path,
                spec.threads_per_worker,
                spec.easyocr_module_path,
                fast_decode=spec.fast_decode,
            ),
            ScorerTimeouts(job_s=spec.timeout_s, start_s=start_timeout_s),
            workers=spec.workers,
            keep_videos=spec.keep_tmp,
        )
        try:
            self._evaluator_tasks = self._pool.names()
            self._composition = Composition(
                weights=dict(spec.weights or ((SCORE, 1.0),)),
                mean_of_dimensions=not spec.task_specific_only,
                flag_unsupported=self._check_tasks(tasks),
            )
        except ScorerFailure as failure:
            self.close()
            raise unusable(spec.evalkit_dir, failure) from failure
        except BaseException:
            self.close()
            raise

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRuleRewards:
        """Queue the rollouts and return at once; see `types.Reward`.

        Raises UserError when more than `max_pending_jobs` rollouts would be waiting: blocking here would
        hold up the next rollout, and with it the overlap that the delayed mode exists for.
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
                f"vbvr_reward_max_pending_jobs {self._spec.max_pending_jobs} cannot hold the {needed} "
                "rollouts of this rank that await a score; set it to rollouts per rank x "
                f"(max_off_policy_steps + 1), at least {needed}"
            )
        verdicts = tuple(self._score(video, request) for video, request in zip(videos, requests, strict=True))
        self._open += verdicts
        return PendingRuleRewards(tuple(requests), verdicts, self._composition)

    def close(self) -> None:
        """End every scorer, delete every temporary file; open samples become missing. May be called twice."""
        self._pool.close()
        self._scratch.close()

    def _check_tasks(self, tasks: Collection[str]) -> bool:
        """Whether some task has no scorer; UserError where that is not allowed."""
        names = match_tasks(tasks, self._evaluator_tasks)
        if names.unknown:
            message = unsupported_message(names.unknown, len(self._evaluator_tasks))
            if self._spec.unsupported_score is None:
                raise UserError(message)
            _log.warning(
                "%s; their samples get vbvr_reward_unsupported_score %s",
                message,
                self._spec.unsupported_score,
            )
        return bool(names.unknown)

    def _score(self, video: np.ndarray, request: RewardRequest) -> Future[Verdict]:
        """Start scoring one rollout, or answer at once where there is nothing to score."""
        sample = request.sample
        task = match_tasks([sample.task], self._evaluator_tasks).known.get(sample.task)
        if task is None:
            return self._unsupported(sample.task)
        try:
            gt_info = ground_truth_info(sample)
        except ValueError as error:
            return _answered(Verdict(error=str(error)))
        return self._pool.submit(self._job(video, request, task, gt_info), video)

    def _unsupported(self, task: str) -> Future[Verdict]:
        score = self._spec.unsupported_score
        if score is None:  # a task that was not among the dataset's when the run started
            return _answered(Verdict(error=f"the evaluator has no scorer for task {task}"))
        components = dict.fromkeys(self._composition.weights, score) | {SCORE: score, UNSUPPORTED: 1.0}
        return _answered(Verdict(components=components))

    def _job(
        self, video: np.ndarray, request: RewardRequest, task: str, gt_info: Mapping[str, str | list[str]]
    ) -> ScoreJob:
        step, prompt, member = request.id
        self._serial += 1
        frames, height, width, channels = video.shape
        return ScoreJob(
            video_path=str(self._scratch.path / f"{self._serial:06d}-{step}-{prompt}-{member}.mp4"),
            shape=(frames, height, width, channels),
            task=task,
            gt_info=gt_info,
            device=self._spec.device,
            fps=self._spec.fps,
            prepared_width=self._spec.prepared_width,
            prepared_height=self._spec.prepared_height,
            prepare_crf=self._spec.prepare_crf,
            max_duration_s=self._spec.max_duration_s,
            threads=self._spec.threads_per_worker,
        )


def ground_truth_info(sample: Sample) -> dict[str, str | list[str]]:
    """The evaluator's `gt_info` of a sample. Raises ValueError when the sample has no ground truth.

    The evaluator answers a bare 0.0, with no error, when a path is missing or relative, so neither leaves
    here.
    """
    named = {
        "gt_video_path": sample.ground_truth_video,
        "gt_first_frame": sample.first_frame,
        "gt_final_frame": sample.final_frame,
        "metafile_path": sample.metadata,
    }
    paths: dict[str, str] = {}
    for name, path in named.items():
        if path is None:
            raise ValueError(f"sample {sample.sample_id} has no {name}; the rule reward needs it")
        if not path.is_absolute():
            raise ValueError(f"sample {sample.sample_id}: {name} {path} is not absolute")
        paths[name] = str(path)
    metadata = paths.pop("metafile_path")
    return {
        **paths,
        "prompt": sample.prompt,
        "gt_path": os.path.dirname(metadata),
        "metafile_path": [metadata],
    }


def _check(spec: RuleRewardSpec) -> None:
    if spec.device != "cpu":
        raise UserError(
            f"vbvr_reward_device {spec.device}: scorers run on the CPU with CUDA hidden, so that they take "
            "no memory from the policy; set cpu"
        )
    check_checkout(spec.evalkit_dir, spec.source_sha256)
    if spec.easyocr_module_path is not None:
        missing = missing_ocr_models(spec.easyocr_module_path)
        if missing is not None:
            raise UserError(missing)


def _reserve_descriptors(pending: int) -> None:
    """Let this process open a descriptor for every waiting rollout; 1,024 is a common soft limit."""
    needed = pending + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"vbvr_reward_max_pending_jobs {pending} needs {needed} open files, the limit is {hard}; "
            "raise it (ulimit -Hn) or lower the number"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _answered(verdict: Verdict) -> Future[Verdict]:
    """A verdict that needed no scorer."""
    now = time.monotonic()
    future: Future[Verdict] = Future()
    future.set_result(replace(verdict, started=now, ended=now))
    return future
