"""An algorithm: GRPO's rollouts with a leave-one-out baseline, not divided by the group's spread."""

from __future__ import annotations

import time
from collections import Counter

import torch

from wan_trainer.algorithms.base import AlgorithmParts
from wan_trainer.algorithms.ratio_gate import check_ratio_gate
from wan_trainer.algorithms.replay import Replayer, ScoredWave
from wan_trainer.algorithms.rewards_table import RewardCensus, gather_rewards, own_rewards, reward_tensors
from wan_trainer.algorithms.statistics import ReplayStatistics, mean_over_samples, peak_memory_gib
from wan_trainer.objectives.surrogate import policy_loss
from wan_trainer.types import PromptBatch, Rollout, StepRecord, UserError


def leave_one_out(rewards: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Each reward minus the mean of the others of its group: (P, G) float32, 0 where there is none.

    rewards: (P, G) float64, nan where missing. valid: (P, G) bool. Source: Kool et al. 2019, Ahmadian
    et al. 2024.
    """
    known = torch.where(valid, rewards, 0.0)
    others = valid.sum(1, keepdim=True) - 1
    baseline = (known.sum(1, keepdim=True) - known) / others.clamp_min(1)
    return torch.where(valid & (others > 0), known - baseline, 0.0).float()


class LeaveOneOut:
    """`Algorithm[Rollout]`: one update for each batch.

    parts: what the run gives every algorithm. strength: factor of the advantages. The keys of a configuration
    that an algorithm does not follow it refuses, so that none is ignored.
    """

    def __init__(self, parts: AlgorithmParts, strength: float = 1.0) -> None:
        if parts.accumulation > 1 or parts.grpo.updates_per_rollout > 1:
            raise UserError(
                "trainer: LeaveOneOut makes one update for each batch; use gradient_accumulation_steps 1 and "
                "grpo_updates_per_rollout 1"
            )
        self.policy_version = parts.policy_version
        self._parts = parts
        self._strength = strength
        self._replayer = Replayer(
            parts.policy,
            parts.reference,
            parts.updater,
            parts.sampler.kind,
            parts.grpo.kl_coeff,
            parts.grpo.train_sample_batch_size,
            policy_loss(parts.grpo.loss),
        )

    def prepare(self, batch: PromptBatch, step: int) -> Rollout:
        """Draw this rank's rollouts of the batch and start scoring them."""
        with self._parts.clock.span("prepare", step):
            return self._parts.rollouts.collect(batch, step, self.policy_version)

    def update(self, rollout: Rollout) -> StepRecord:
        """Score and replay wave by wave, then change the weights."""
        parts, grpo, batch, started = self._parts, self._parts.grpo, rollout.batch, time.monotonic()
        steps = rollout.waves[0].chunks[0].trajectory.steps
        samples = len(batch.samples) * grpo.group_size
        terms = samples * len(steps)
        census = RewardCensus(samples)
        statistics = ReplayStatistics(len(steps), parts.device)
        age, waited, advantage_sum, silent = self.policy_version - rollout.policy_version, 0.0, 0.0, 0
        parts.policy.train()
        parts.updater.zero_grad()
        for wave in rollout.waves:
            before = time.monotonic()
            table = gather_rewards(
                own_rewards(wave), wave.prompts, batch.step, grpo.group_size, parts.communicator
            )
            waited += time.monotonic() - before
            parts.observer.rewards(batch, table)
            census.add(table)
            census.check(
                grpo.reward_max_error_rate,
                grpo.fail_on_reward_error_key if grpo.fail_on_reward_error else None,
            )
            rewards, valid = reward_tensors(table)
            limit = grpo.adv_clip_max
            advantages = (self._strength * leave_one_out(rewards, valid)).clamp(-limit, limit)
            advantage_sum += float(advantages.abs().sum())
            silent += int((advantages == 0).all(1).sum())
            with parts.clock.span("replay", batch.step):
                # The loss is a sum over all rollouts; FSDP averages gradients over the ranks that hold them.
                self._replayer.accumulate(
                    ScoredWave(wave, advantages, valid),
                    clip_range=grpo.clip_range if age == 0 else grpo.stale_clip_range,
                    scale=parts.communicator.dp_size / terms,
                    statistics=statistics,
                    is_last=wave is rollout.waves[-1],
                )
        summary = statistics.reduce(parts.communicator)
        if age == 0:
            check_ratio_gate(summary, steps, parts.policy, grpo, parts.sampler)
        with parts.clock.span("optimize", batch.step):
            result = parts.updater.step()
        self.policy_version += 0 if result.skipped else 1
        seconds = time.monotonic() - started
        return StepRecord(
            step=parts.updater.updates,
            batch=batch.step,
            epoch=batch.epoch,
            policy_loss=sum(summary.loss) / terms,
            kl_loss=sum(summary.kl_loss) / terms,
            reward_mean=census.mean,
            reward_std=census.std,
            reward_valid_fraction=census.valid_fraction,
            zero_std_groups=silent,
            advantage_abs_mean=advantage_sum / samples,
            ratio_mean=mean_over_samples([summary.ratio], [summary.samples]),
            ratio_max_dev=max(summary.deviation),
            clip_fraction=mean_over_samples([summary.clipped], [summary.samples]),
            approx_kl=mean_over_samples([summary.kl_estimate], [summary.samples]),
            policy_age=age,
            policy_version=self.policy_version,
            grad_norm=result.grad_norm,
            lr=result.lr,
            prepare_s=rollout.prepare_s,
            reward_wait_s=waited,
            replay_s=seconds - waited,
            step_s=rollout.prepare_s + seconds,
            rollouts_per_s=samples / (rollout.prepare_s + seconds),
            peak_memory_gib=peak_memory_gib(parts.device),
            replayed_steps=len(steps),
            components=census.components,
            replayed_per_expert=Counter(parts.policy.expert_for(step.sigma) for step in steps),
            skipped=result.skipped,
            frozen_steps=sum(not parts.policy.trains_at(step.sigma) for step in steps),
            replayed_samples=round(sum(summary.samples)),
        )
