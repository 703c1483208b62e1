"""Group relative policy optimization on diffusion trajectories."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wan_trainer.algorithms.protocols import (
    Communicator,
    Observer,
    PhaseClock,
    Policy,
    RolloutSource,
    Updater,
    UpdateResult,
)
from wan_trainer.algorithms.ratio_gate import check_ratio_gate
from wan_trainer.algorithms.replay import Replayer, ScoredWave, trained_positions
from wan_trainer.algorithms.rewards_table import RewardCensus, gather_rewards, own_rewards, reward_tensors
from wan_trainer.algorithms.statistics import (
    ReplayStatistics,
    ReplaySummary,
    mean_over_samples,
    peak_memory_gib,
)
from wan_trainer.config.specs import GrpoSpec, SamplerSpec
from wan_trainer.objectives.advantages import flat_groups, group_advantages
from wan_trainer.objectives.surrogate import policy_loss
from wan_trainer.recording.clock import naming
from wan_trainer.sampling.noise import group_eta
from wan_trainer.sampling.sampler import Velocity
from wan_trainer.types import PromptBatch, Rollout, SampleId, StepRecord, StoredStep, Wave


@dataclass
class _Replayed:
    """One rollout of the accumulation window after its first pass."""

    rollout: Rollout
    steps: tuple[StoredStep, ...]
    age: int
    census: RewardCensus
    waves: list[ScoredWave]
    flat_groups: int
    reward_wait_s: float
    passes: list[ReplaySummary]


class Grpo:
    """`Algorithm[Rollout]`: draw groups of rollouts, score them, replay some of their steps with a gradient.

    rollouts: where they come from. updater: applies gradients. accumulation: batches per optimizer update.
    policy_version: weight changes so far; a skipped update changes none. reference: the frozen policy of the
    KL term, needed when `grpo.kl_coeff` > 0.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        rollouts: RolloutSource,
        updater: Updater,
        communicator: Communicator,
        clock: PhaseClock,
        observer: Observer,
        grpo: GrpoSpec,
        sampler: SamplerSpec,
        accumulation: int,
        device: torch.device,
        policy_version: int = 0,
        reference: Velocity | None = None,
    ) -> None:
        assert accumulation >= 1 and grpo.updates_per_rollout >= 1, (accumulation, grpo.updates_per_rollout)
        self.policy_version = policy_version
        self._policy = policy
        self._rollouts = rollouts
        self._updater = updater
        self._communicator = communicator
        self._clock = clock
        self._observer = observer
        self._grpo = grpo
        self._sampler = sampler
        self._accumulation = accumulation
        self._device = device
        self._replayer = Replayer(
            policy,
            reference,
            updater,
            sampler.kind,
            grpo.kl_coeff,
            grpo.train_sample_batch_size,
            policy_loss(grpo.loss),
        )
        self._window: list[_Replayed] = []
        self._busy_s = 0.0

    def prepare(self, batch: PromptBatch, step: int) -> Rollout:
        """Draw this rank's rollouts of `batch` and start scoring them."""
        started = time.monotonic()
        with self._clock.span("prepare", step):
            rollout = self._rollouts.collect(batch, step, self.policy_version)
        self._busy_s += time.monotonic() - started
        return rollout

    def update(self, rollout: Rollout) -> StepRecord | None:
        """Replay `rollout` and, when the accumulation window is full, update the weights.

        Raises RunFailure when too many rewards are missing and RatioGateError when an unchanged policy does
        not replay with ratio 1; both before the weights change.
        """
        started = time.monotonic()
        self._policy.train()
        if not self._window:
            self._updater.zero_grad()
        self._window.append(self._first_pass(rollout))
        if len(self._window) < self._accumulation:
            self._busy_s += time.monotonic() - started
            return None
        window, self._window = self._window, []
        results = [self._optimize(window)]
        for _ in range(1, self._grpo.updates_per_rollout):
            for replayed in window:
                self._next_pass(replayed)
            results.append(self._optimize(window))
        update_s = time.monotonic() - started
        self._busy_s += update_s
        return self._record(window, results, update_s)

    def _first_pass(self, rollout: Rollout) -> _Replayed:
        """Wave by wave: wait for its rewards, replay it; later waves are still being scored."""
        batch, spec = rollout.batch, self._grpo
        steps = rollout.waves[0].chunks[0].trajectory.steps
        replayed = _Replayed(
            rollout=rollout,
            steps=steps,
            age=self.policy_version - rollout.policy_version,
            census=RewardCensus(len(batch.samples) * spec.group_size),
            waves=[],
            flat_groups=0,
            reward_wait_s=0.0,
            passes=[],
        )
        statistics = ReplayStatistics(len(steps), self._device)
        for wave in rollout.waves:
            scored = self._score(replayed, wave)
            replayed.waves.append(scored)
            self._replay(replayed, scored, statistics)
        summary = statistics.reduce(self._communicator)
        replayed.passes.append(summary)
        if replayed.age == 0:
            check_ratio_gate(summary, steps, self._policy, spec, self._sampler)
        return replayed

    def _next_pass(self, replayed: _Replayed) -> None:
        statistics = ReplayStatistics(len(replayed.steps), self._device)
        for scored in replayed.waves:
            self._replay(replayed, scored, statistics)
        replayed.passes.append(statistics.reduce(self._communicator))

    def _score(self, replayed: _Replayed, wave: Wave) -> ScoredWave:
        """The advantages of a wave once all its rewards are in."""
        batch, spec = replayed.rollout.batch, self._grpo
        started = time.monotonic()
        with self._clock.span("reward_wait", batch.step):
            own = own_rewards(wave)
            table = gather_rewards(own, wave.prompts, batch.step, spec.group_size, self._communicator)
        for result in own:
            if result.ended > result.started:
                self._clock.add("score", batch.step, result.started, result.ended)
        replayed.reward_wait_s += time.monotonic() - started
        self._observer.rewards(batch, table)
        replayed.census.add(table)
        replayed.census.check(
            spec.reward_max_error_rate,
            spec.fail_on_reward_error_key if spec.fail_on_reward_error else None,
        )
        rewards, valid = reward_tensors(table)
        advantages = group_advantages(rewards, valid, spec.adv_clip_max)
        silent = flat_groups(rewards, valid)
        # A group of eta 0 took every step without a choice: whatever its rewards, it holds no policy
        # gradient, and the rounding of a narrow trajectory dtype must not pass for one.
        ids = [SampleId(batch.step, prompt, 0) for prompt in wave.prompts]
        sampler = self._sampler
        silent |= group_eta(sampler.seed, ids, sampler.eta, sampler.eta_range) == 0
        replayed.flat_groups += int(silent.sum())
        return ScoredWave(wave, torch.where(silent[:, None], 0.0, advantages), valid)

    def _replay(self, replayed: _Replayed, scored: ScoredWave, statistics: ReplayStatistics) -> None:
        """Accumulate the gradient of one wave.

        The loss is a sum over samples and replayed steps over the constant P * G * S of the whole batch; FSDP
        averages gradients over the dp ranks, so each rank's share is multiplied by their number.
        """
        batch, spec = replayed.rollout.batch, self._grpo
        terms = len(batch.samples) * spec.group_size * len(replayed.steps)
        drawn = {i.prompt for chunk in scored.wave.chunks for i in chunk.trajectory.ids}
        names = (batch.samples[prompt].sample_id for prompt in sorted(drawn))  # read on a failure only
        with naming(names), self._clock.span("replay", batch.step):
            self._replayer.accumulate(
                scored,
                clip_range=spec.clip_range if replayed.age == 0 else spec.stale_clip_range,
                scale=self._communicator.dp_size / (terms * self._accumulation),
                statistics=statistics,
                is_last=scored.wave is replayed.rollout.waves[-1],
            )

    def _optimize(self, window: Sequence[_Replayed]) -> UpdateResult:
        passes = [replayed.passes[-1] for replayed in window]
        losses = [loss for summary in passes for loss in (*summary.loss, *summary.kl_loss)]
        with self._clock.span("optimize", window[-1].rollout.batch.step):
            result = self._updater.step(finite_loss=all(map(math.isfinite, losses)))
        if not result.skipped:
            self.policy_version += 1
        return result

    def _record(
        self, window: Sequence[_Replayed], results: Sequence[UpdateResult], update_s: float
    ) -> StepRecord:
        """The metrics of an update: of every batch of the window and every pass over it."""
        batch, spec = window[-1].rollout.batch, self._grpo
        census = RewardCensus.merged([replayed.census for replayed in window])
        passes = [summary for replayed in window for summary in replayed.passes]
        samples = [summary.samples for summary in passes]
        terms = len(batch.samples) * spec.group_size * len(window[-1].steps) * len(passes)
        reward_wait_s = sum(replayed.reward_wait_s for replayed in window)
        steps = [step for replayed in window for step in replayed.steps]
        experts = [self._policy.expert_for(step.sigma) for step in steps]
        evaluated = len(trained_positions(self._policy, steps))
        step_s, self._busy_s = self._busy_s, 0.0
        return StepRecord(
            step=self._updater.updates,
            batch=batch.step,
            epoch=batch.epoch,
            policy_loss=sum(sum(summary.loss) for summary in passes) / terms,
            kl_loss=sum(sum(summary.kl_loss) for summary in passes) / terms,
            reward_mean=census.mean,
            reward_std=census.std,
            reward_valid_fraction=census.valid_fraction,
            zero_std_groups=sum(replayed.flat_groups for replayed in window),
            advantage_abs_mean=_advantage_abs_mean(window),
            # A ratio of 1 that nobody computed would read as a check that passed.
            ratio_mean=mean_over_samples([s.ratio for s in passes], samples) if evaluated else math.nan,
            ratio_max_dev=max(max(r.passes[0].deviation) for r in window) if evaluated else math.nan,
            clip_fraction=mean_over_samples([summary.clipped for summary in passes], samples),
            approx_kl=mean_over_samples([summary.kl_estimate for summary in passes], samples),
            policy_age=max(replayed.age for replayed in window),
            policy_version=self.policy_version,
            grad_norm=results[-1].grad_norm,
            lr=results[-1].lr,
            prepare_s=sum(replayed.rollout.prepare_s for replayed in window),
            reward_wait_s=reward_wait_s,
            replay_s=update_s - reward_wait_s,
            step_s=step_s,
            rollouts_per_s=len(window) * len(batch.samples) * spec.group_size / step_s,
            peak_memory_gib=peak_memory_gib(self._device),
            replayed_steps=len(experts),
            components=census.components,
            replayed_per_expert={name: experts.count(name) for name in sorted(set(experts))},
            skipped=any(result.skipped for result in results),
            frozen_steps=len(steps) - evaluated,
            replayed_samples=round(sum(map(sum, samples))),
        )


def _advantage_abs_mean(window: Sequence[_Replayed]) -> float:
    """Mean |advantage| over the valid members."""
    waves = [scored for replayed in window for scored in replayed.waves]
    total = sum(float(scored.advantages.abs().double().sum()) for scored in waves)
    return total / max(1, sum(int(scored.valid.sum()) for scored in waves))
