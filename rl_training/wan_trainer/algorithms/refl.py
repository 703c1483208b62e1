"""Reward feedback learning: the gradient of a differentiable reward, through the decoder into some steps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch

from wan_trainer.algorithms.encoding import PromptEncoder
from wan_trainer.algorithms.protocols import (
    BranchPolicy,
    BranchReference,
    Communicator,
    Observer,
    PhaseClock,
    PixelDecoder,
    Updater,
)
from wan_trainer.algorithms.rewards_table import RewardCensus, gather_rewards
from wan_trainer.algorithms.statistics import peak_memory_gib
from wan_trainer.config.specs import ReflSpec, SamplerSpec
from wan_trainer.objectives.refl import reward_loss
from wan_trainer.recording.clock import naming
from wan_trainer.sampling.differentiable import (
    GradPlan,
    Guidance,
    Sampled,
    draw,
    grad_plan,
    step_backward,
)
from wan_trainer.sampling.noise import initial_noise
from wan_trainer.topology import assign
from wan_trainer.types import (
    Condition,
    DifferentiableReward,
    DifferentiableScores,
    PromptBatch,
    RewardRequest,
    RewardResult,
    SampleId,
    StepRecord,
)


@dataclass(frozen=True)
class ReflChunk:
    """Videos of one rank that are sampled, decoded and scored in one call."""

    ids: tuple[SampleId, ...]
    condition: Condition
    sampled: Sampled


@dataclass(frozen=True)
class ReflRollout:
    """One prepared batch: this rank's share of it, up to where the gradient begins."""

    batch: PromptBatch
    plan: GradPlan
    chunks: tuple[ReflChunk, ...]
    prepare_s: float


@dataclass
class _Learned:
    """One batch of the accumulation window after its backward passes. loss, kl_loss: means over samples."""

    batch: PromptBatch
    plan: GradPlan
    census: RewardCensus
    loss: float
    kl_loss: float
    prepare_s: float


@dataclass(frozen=True)
class ReflParts:
    """What a run gives ReFL; the docstrings of the parts' protocols say how they behave.

    reward: what is trained on. monitor: another reward that is only logged. grid: T + 1 sigmas down to 0.
    latent_shape: (C, F, h, w). latent_dtype: float32 in a run. accumulation: batches per optimizer update.
    reference: needed when `refl.kl_coeff` > 0.
    """

    policy: BranchPolicy
    encode: PromptEncoder
    decode: PixelDecoder
    reward: DifferentiableReward
    updater: Updater
    communicator: Communicator
    clock: PhaseClock
    observer: Observer
    refl: ReflSpec
    sampler: SamplerSpec
    grid: Sequence[float]
    latent_shape: Sequence[int]
    accumulation: int
    device: torch.device
    monitor: DifferentiableReward | None = None
    reference: BranchReference | None = None
    policy_version: int = 0
    latent_dtype: torch.dtype = torch.float32


@dataclass
class _Scored:
    """This rank's verdicts and divergences of one batch, in the order of its samples."""

    results: list[RewardResult] = field(default_factory=list[RewardResult])
    divergences: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


class Refl:
    """`Algorithm[ReflRollout]`: draw one video a prompt, score it, and follow the gradient of its reward."""

    def __init__(self, parts: ReflParts) -> None:
        assert parts.accumulation >= 1, parts.accumulation
        assert parts.refl.kl_coeff == 0 or parts.reference is not None, "a KL term needs a reference policy"
        self.policy_version = parts.policy_version
        self._parts = parts
        self._guidance = Guidance(parts.sampler.cfg_scale, parts.refl.cfg_grad)
        self._window: list[_Learned] = []
        self._busy_s = 0.0

    def prepare(self, batch: PromptBatch, step: int) -> ReflRollout:
        """Draw this rank's videos of `batch` without a gradient, keeping where the gradient begins."""
        parts, started = self._parts, time.monotonic()
        refl, ranks = parts.refl, parts.communicator
        parts.policy.eval()
        plan = grad_plan(refl.algorithm, refl.first_grad_step, refl.last_grad_step, parts.sampler.seed, step)
        with parts.clock.span("prepare", step):
            share = assign(len(batch.samples), 1, ranks.dp_rank, ranks.dp_size)
            ids = [SampleId(step, prompt, member) for prompt, member in share]
            encoded, row_of = parts.encode(batch, ids)
            chunks: list[ReflChunk] = []
            for start in range(0, len(ids), refl.sample_batch_size):
                part = tuple(ids[start : start + refl.sample_batch_size])
                condition = encoded.select([row_of[i.prompt] for i in part])
                with _naming(batch, part), parts.clock.span("sample", step):
                    sampled = draw(
                        parts.policy, condition, self._noise(part), parts.grid, plan, self._guidance
                    )
                chunks.append(ReflChunk(part, condition, sampled))
        elapsed = time.monotonic() - started
        self._busy_s += elapsed
        return ReflRollout(batch, plan, tuple(chunks), elapsed)

    def update(self, rollout: ReflRollout) -> StepRecord | None:
        """Backpropagate the rewards of `rollout`; when the accumulation window is full, update the weights.

        Raises RunFailure when too many rewards are missing, before the weights change.
        """
        parts, started = self._parts, time.monotonic()
        parts.policy.train()
        if not self._window:
            parts.updater.zero_grad()
        self._window.append(self._learn(rollout))
        if len(self._window) < parts.accumulation:
            self._busy_s += time.monotonic() - started
            return None
        window, self._window = self._window, []
        finite = all(math.isfinite(learned.loss + learned.kl_loss) for learned in window)
        with parts.clock.span("optimize", rollout.batch.step):
            result = parts.updater.step(finite_loss=finite)
        if not result.skipped:
            self.policy_version += 1
        update_s = time.monotonic() - started
        self._busy_s += update_s
        return self._record(window, result.grad_norm, result.lr, result.skipped, update_s)

    def _noise(self, ids: Sequence[SampleId]) -> torch.Tensor:
        """(N, C, F, h, w) on the training device."""
        parts = self._parts
        keys = [SampleId(0, 0, 0)] * len(ids) if parts.refl.fixed_noise else ids
        noise = initial_noise(parts.sampler.seed, keys, parts.latent_shape, shared=False)
        return noise.to(parts.device, parts.latent_dtype)

    def _learn(self, rollout: ReflRollout) -> _Learned:
        """Backward through every chunk; gradients accumulate.

        The loss is a mean over the samples of the whole batch; FSDP averages gradients over the dp ranks, so
        each rank's share is multiplied by their number.
        """
        parts, batch = self._parts, rollout.batch
        scale = parts.communicator.dp_size / (len(batch.samples) * parts.accumulation)
        scored = _Scored()
        for chunk in rollout.chunks:
            with _naming(batch, chunk.ids):
                gradient = self._score(batch, chunk, scale, scored)
                with parts.clock.span("replay", batch.step):
                    is_last = chunk is rollout.chunks[-1]
                    self._backward(rollout.plan, chunk, gradient, scale, is_last, scored)
        return self._gathered(rollout, scored)

    def _score(self, batch: PromptBatch, chunk: ReflChunk, scale: float, scored: _Scored) -> torch.Tensor:
        """The gradient of the loss in the clean latents of `chunk`; its verdicts are added to `scored`."""
        parts, samples = self._parts, [batch.samples[i.prompt] for i in chunk.ids]
        started = time.monotonic()

        def objective(
            pixels: torch.Tensor,
        ) -> tuple[torch.Tensor, tuple[DifferentiableScores, torch.Tensor]]:
            scores = parts.reward.score(pixels, samples)
            losses = reward_loss(scores.reward, parts.refl)
            return losses.sum() * scale, (scores, pixels.detach())

        with parts.clock.span("reward", batch.step):
            (scores, pixels), gradient = parts.decode.gradient(chunk.sampled.x0, objective)
            watched = None
            if parts.monitor is not None:
                with torch.no_grad():
                    watched = parts.monitor.score(pixels, samples)
            scored.results += verdicts(chunk.ids, scores, watched, started)
        if parts.encode.leads and parts.observer.wants_videos(batch):
            requests = [RewardRequest(i, batch.samples[i.prompt]) for i in chunk.ids]
            parts.observer.videos(batch, as_video(pixels), requests)
        # A verdict that is missing teaches nothing, whatever its graph says.
        valid = torch.isfinite(scores.reward.detach()).to(gradient.device).view(-1, 1, 1, 1, 1)
        gradient = torch.where(valid, gradient, 0.0)
        return gradient if parts.encode.peers is None else parts.encode.peers.same(gradient)

    def _backward(
        self,
        plan: GradPlan,
        chunk: ReflChunk,
        gradient: torch.Tensor,
        scale: float,
        is_last: bool,
        scored: _Scored,
    ) -> None:
        """From the clean latents to the first step with a gradient.

        All ranks run the same backwards at the same sigmas in the same order: shares are equal, and the steps
        are a function of the batch.
        """
        parts, condition, grid = self._parts, chunk.condition, self._parts.grid
        first_use = {parts.policy.expert_for(grid[index]): index for index in reversed(plan.steps)}
        divergence = torch.zeros(len(chunk.ids), device=gradient.device)
        for index in reversed(plan.steps):
            sigma, x_t = grid[index], chunk.sampled.latents[index]
            reference = None
            if parts.reference is not None and parts.refl.kl_coeff > 0:
                # Before the policy's forward: no activations are held meanwhile, and a reference that shares
                # the policy's modules comes between no forward and its backward.
                with torch.no_grad():
                    reference = parts.reference.branch(x_t, sigma, condition)
            parts.updater.set_gradient_sync(is_last and first_use[parts.policy.expert_for(sigma)] == index)
            earlier, diverged = step_backward(
                parts.policy,
                condition,
                x_t,
                sigma,
                0.0 if plan.jump else grid[index + 1],
                gradient,
                self._guidance,
                through=plan.through,
                needs_input=index != plan.steps[0],
                reference=reference,
                kl_scale=parts.refl.kl_coeff * scale / len(plan.steps),
            )
            divergence += diverged / len(plan.steps)
            if earlier is not None:
                gradient = earlier
        scored.divergences.append(divergence)

    def _gathered(self, rollout: ReflRollout, scored: _Scored) -> _Learned:
        """The verdicts of all ranks, recorded and checked, and the mean losses."""
        parts, batch = self._parts, rollout.batch
        prompts = tuple(range(len(batch.samples)))
        with parts.clock.span("reward_wait", batch.step):
            table = gather_rewards(scored.results, prompts, batch.step, 1, parts.communicator)
            divergence = torch.cat(scored.divergences).sum().double()
            divergence = float(parts.communicator.all_reduce(divergence, "sum").item()) / len(prompts)
        parts.observer.rewards(batch, table)
        census = RewardCensus(len(prompts))
        census.add(table)
        census.check(parts.refl.reward_max_error_rate)
        rewards = torch.tensor([row[0].reward for row in table.results], dtype=torch.float64)
        return _Learned(
            batch=batch,
            plan=rollout.plan,
            census=census,
            loss=float(reward_loss(rewards, parts.refl).sum()) / len(prompts),
            kl_loss=parts.refl.kl_coeff * divergence,
            prepare_s=rollout.prepare_s,
        )

    def _record(
        self, window: Sequence[_Learned], grad_norm: float, lr: float, skipped: bool, update_s: float
    ) -> StepRecord:
        """The metrics of an update over every batch of the window. There is no ratio: nothing is replayed."""
        parts, batch = self._parts, window[-1].batch
        census = RewardCensus.merged([learned.census for learned in window])
        experts = [
            parts.policy.expert_for(parts.grid[index]) for learned in window for index in learned.plan.steps
        ]
        step_s, self._busy_s = self._busy_s, 0.0
        return StepRecord(
            step=parts.updater.updates,
            batch=batch.step,
            epoch=batch.epoch,
            policy_loss=sum(learned.loss for learned in window) / len(window),
            kl_loss=sum(learned.kl_loss for learned in window) / len(window),
            reward_mean=census.mean,
            reward_std=census.std,
            reward_valid_fraction=census.valid_fraction,
            zero_std_groups=0,
            advantage_abs_mean=math.nan,
            ratio_mean=math.nan,
            ratio_max_dev=math.nan,
            clip_fraction=math.nan,
            approx_kl=math.nan,
            policy_age=0,
            policy_version=self.policy_version,
            grad_norm=grad_norm,
            lr=lr,
            prepare_s=sum(learned.prepare_s for learned in window),
            reward_wait_s=0.0,
            replay_s=update_s,
            step_s=step_s,
            rollouts_per_s=len(window) * len(batch.samples) / step_s,
            peak_memory_gib=peak_memory_gib(parts.device),
            replayed_steps=len(experts),
            components=census.components,
            replayed_per_expert=_counted(experts),
            skipped=skipped,
        )


def verdicts(
    ids: Sequence[SampleId],
    scores: DifferentiableScores,
    watched: DifferentiableScores | None,
    started: float,
) -> list[RewardResult]:
    """What a reward and, as components, a monitor say of N videos. started: `time.monotonic()`."""
    reward = scores.reward.detach().float().cpu()
    components = {name: values.float().cpu() for name, values in scores.components.items()}
    if watched is not None:
        components["monitor"] = watched.reward.float().cpu()
        components |= {f"monitor.{name}": values.float().cpu() for name, values in watched.components.items()}
    ended = time.monotonic()
    return [
        RewardResult(
            i,
            float(reward[row]),
            {name: float(values[row]) for name, values in components.items()},
            _missing(reward[row]),
            started,
            ended,
        )
        for row, i in enumerate(ids)
    ]


def as_video(pixels: torch.Tensor) -> np.ndarray:
    """(N, 3, frames, H, W) in [0, 1] -> uint8 (N, frames, H, W, 3) on the CPU."""
    return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).cpu().numpy()


def _naming(batch: PromptBatch, ids: Sequence[SampleId]) -> AbstractContextManager[None]:
    return naming(batch.samples[i.prompt].sample_id for i in ids)


def _missing(reward: torch.Tensor) -> str | None:
    return None if math.isfinite(float(reward)) else "the reward gave no verdict"


def _counted(experts: Sequence[str]) -> Mapping[str, int]:
    return {name: experts.count(name) for name in sorted(set(experts))}
