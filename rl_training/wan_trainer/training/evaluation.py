"""Evaluation in training: held prompts drawn without choices, from noise that no training step shares.

It reads the weights and changes nothing that training reads: its draws are keyed by a position of their own,
and what user code draws from torch's generators is given back.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from wan_trainer.algorithms.protocols import (
    BranchPolicy,
    Communicator,
    Conditioner,
    Decoder,
    Peers,
    PhaseClock,
    PixelDecoder,
)
from wan_trainer.algorithms.refl import as_video, verdicts
from wan_trainer.algorithms.rewards_table import RewardCensus
from wan_trainer.config.specs import RunSpec, SamplerSpec
from wan_trainer.data.dataset import HELD, check_ground_truth, load_held
from wan_trainer.data.first_frames import load_first_frames
from wan_trainer.data.image_rule import takes_first_frames
from wan_trainer.distributed.collectives import on_every_rank, require_same_files
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.recording.clock import naming
from wan_trainer.recording.jsonl import RowReader
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.sampling.differentiable import GradPlan, Guidance, draw
from wan_trainer.sampling.noise import initial_noise
from wan_trainer.types import (
    DifferentiableReward,
    EvaluationRecord,
    PendingRewards,
    Reward,
    RewardRequest,
    RewardResult,
    RewardTable,
    Sample,
    SampleId,
)

STEP = -1
"""The position of held prompts: no batch of training has it, so none shares their noise."""
VIDEOS_KEPT = 4


@dataclass(frozen=True)
class Held:
    """The held prompts, and what of them this rank draws.

    share: indices into `samples`, as many on every rank; the first `own` are this rank's, the others repeat
    prompts so that all ranks make the same calls. first_frames: uint8 (len(share), 3, H, W), None without.
    """

    samples: tuple[Sample, ...]
    tasks: tuple[str, ...]
    share: tuple[int, ...]
    own: int
    first_frames: torch.Tensor | None


def share_of(held: int, rank: int, ranks: int) -> tuple[tuple[int, ...], int]:
    """Indices of `held` prompts for one data-parallel rank, and how many of them, from the first, count.

    Equal, contiguous shares; what is left over at the end is filled up from the first prompt again.
    """
    size = -(-held // ranks)
    flat = range(rank * size, (rank + 1) * size)
    return tuple(index % held for index in flat), sum(index < held for index in flat)


def open_held(spec: RunSpec, mesh: Mesh) -> Held | None:
    """The held prompts of an evaluation, the same on every node; None when it is off.

    Raises SharedUserError for what is wrong with them, before any weights are loaded.
    """
    evaluation = spec.evaluation
    if evaluation is None:
        return None

    def opened() -> tuple[Held, dict[str, str]]:
        dataset = load_held(spec.data, evaluation)
        with_frames = takes_first_frames(dataset, spec.model.family, HELD)
        if spec.reward.rule is not None:
            check_ground_truth(dataset, HELD)
        share, own = share_of(len(dataset), mesh.dp_rank, mesh.dp_size)
        samples = tuple(dataset)
        frames = None
        if with_frames:
            frames = load_first_frames([samples[i] for i in share], spec.data.height, spec.data.width)
        return Held(samples, dataset.tasks, share, own, frames), dataset.digests

    held, digests = on_every_rank(mesh, opened)
    require_same_files(mesh, HELD, digests)
    return held


class Scorer(Protocol):
    """Decodes and scores."""

    def __call__(
        self, x0: torch.Tensor, requests: Sequence[RewardRequest]
    ) -> tuple[np.ndarray, PendingRewards]:
        """The videos of clean latents (N, C, F, h, w), uint8 (N, frames, H, W, 3), and their verdicts."""
        ...


@dataclass(frozen=True)
class SubmittedScores:
    """A `Scorer` of GRPO's rewards."""

    decode: Decoder
    reward: Reward

    def __call__(
        self, x0: torch.Tensor, requests: Sequence[RewardRequest]
    ) -> tuple[np.ndarray, PendingRewards]:
        """See `Scorer`."""
        videos = self.decode(x0)
        return videos, self.reward.submit(videos, requests)


@dataclass(frozen=True)
class Ready:
    """Verdicts that need no waiting."""

    results: list[RewardResult]

    def result(self) -> list[RewardResult]:
        """See `types.PendingRewards`."""
        return self.results


@dataclass(frozen=True)
class DirectScores:
    """A `Scorer` of ReFL's rewards; monitor: another one that is only logged."""

    decode: PixelDecoder
    reward: DifferentiableReward
    monitor: DifferentiableReward | None = None

    def __call__(
        self, x0: torch.Tensor, requests: Sequence[RewardRequest]
    ) -> tuple[np.ndarray, PendingRewards]:
        """See `Scorer`."""
        started, samples = time.monotonic(), [request.sample for request in requests]
        pixels = self.decode(x0)
        scores = self.reward.score(pixels, samples)
        watched = None if self.monitor is None else self.monitor.score(pixels, samples)
        ids = [request.id for request in requests]
        return as_video(pixels), Ready(verdicts(ids, scores, watched, started))


@dataclass(frozen=True)
class Evaluation:
    """Draws and scores the held prompts with the weights of the moment.

    score: None on a rank whose videos a tensor-parallel peer scores. grid: T + 1 sigmas down to 0.
    latent_shape: (C, F, h, w). chunk_size: videos per batched call. keep: sees (batches before, index of the
    prompt, uint8 (frames, H, W, 3)) of the first few.
    """

    policy: BranchPolicy
    condition: Conditioner
    score: Scorer | None
    held: Held
    sampler: SamplerSpec
    guidance: Guidance
    grid: Sequence[float]
    latent_shape: Sequence[int]
    chunk_size: int
    communicator: Communicator
    clock: PhaseClock
    keep: Callable[[int, int, np.ndarray], None]
    device: torch.device
    peers: Peers | None = None

    @torch.no_grad()
    def __call__(self, seen: int, updates: int) -> EvaluationRecord:
        """Evaluate after `seen` batches and `updates` optimizer updates; the same record on every rank.

        A reward that is missing is left out of the means, however many there are.
        """
        started = time.monotonic()
        devices = [self.device] if self.device.type == "cuda" else []
        with self.clock.span("evaluate", max(seen - 1, 0)), torch.random.fork_rng(devices):
            self.policy.eval()
            gathered = self.communicator.gather_objects(self._verdicts(seen))
        results = complete([result for part in gathered for result in part], len(self.held.samples))
        return evaluation_record(seen, updates, results, time.monotonic() - started)

    def _verdicts(self, seen: int) -> list[RewardResult]:
        """The verdicts on this rank's own prompts. One chunk is scored while the next one is drawn."""
        held, results = self.held, list[RewardResult]()
        pending: PendingRewards | None = None
        for start in range(0, len(held.share), self.chunk_size):
            prompts = held.share[start : start + self.chunk_size]
            own = prompts[: max(0, held.own - start)]
            with naming(held.samples[prompt].sample_id for prompt in prompts):
                x0 = self._draw(start, prompts)
                if not own or self.score is None:
                    continue
                # The queue of a reward has room for a batch of training, and not for all held prompts.
                results += [] if pending is None else pending.result()
                requests = [RewardRequest(held_id(prompt), held.samples[prompt]) for prompt in own]
                videos, pending = self.score(x0[: len(own)], requests)
                if self._leads:
                    for prompt, video in zip(own, videos, strict=True):
                        if prompt < VIDEOS_KEPT:
                            self.keep(seen, prompt, video)
        return results if pending is None else results + pending.result()

    def _draw(self, start: int, prompts: Sequence[int]) -> torch.Tensor:
        """The clean latents of part of the share, by Euler steps alone."""
        held, condition = self.held, None
        if self._leads:
            frames = held.first_frames
            condition = self.condition(
                [held.samples[prompt] for prompt in prompts],
                None if frames is None else frames[start : start + len(prompts)],
            )
        if self.peers is not None:
            condition = self.peers.share(condition)
        assert condition is not None
        ids = [held_id(prompt) for prompt in prompts]
        noise = initial_noise(self.sampler.seed, ids, self.latent_shape, shared=False).to(self.device)
        return draw(self.policy, condition, noise, self.grid, GradPlan(()), self.guidance).x0

    @property
    def _leads(self) -> bool:
        return self.peers is None or self.peers.leads


def held_id(prompt: int) -> SampleId:
    """The identity of a held prompt, which keys its noise: the same at every evaluation of every run."""
    return SampleId(STEP, prompt, 0)


def complete(results: Sequence[RewardResult], held: int) -> list[RewardResult]:
    """One verdict for each of `held` prompts, in their order; without one it is missing."""
    by_prompt = {result.id.prompt: result for result in results}
    missing = [RewardResult(held_id(prompt), math.nan, error="no verdict") for prompt in range(held)]
    return [by_prompt.get(prompt, missing[prompt]) for prompt in range(held)]


def evaluation_record(
    seen: int, updates: int, results: Sequence[RewardResult], seconds: float
) -> EvaluationRecord:
    """What is reported of the verdicts on all held prompts."""
    census = RewardCensus(len(results))
    census.add(RewardTable(tuple(range(len(results))), tuple((result,) for result in results)))
    reasons = Counter(
        result.error or f"reward is not finite ({result.reward})" for result in results if not result.valid
    )
    return EvaluationRecord(
        batch=seen,
        step=updates,
        prompts=len(results),
        reward_mean=census.mean,
        reward_std=census.std,
        reward_valid_fraction=census.valid_fraction,
        components=census.components,
        seconds=seconds,
        error=reasons.most_common(1)[0][0] if reasons else None,
    )


def due_at_start(files: RunFiles, every: int, done: int) -> bool:
    """Whether a start that has `done` batches behind it begins with an evaluation.

    A curve begins where it is switched on, and an evaluation that a stop or a kill prevented is made up for;
    one that is recorded is not made again.
    """
    recorded = [row.get("batch") for row in RowReader(files.evaluations)]
    return not recorded or (done % every == 0 and done not in recorded)
