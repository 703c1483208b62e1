"""How much work a step is: calls, replayed steps, stored latents, and how long the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wan_trainer.config.specs import RuleRewardSpec, RunSpec, Target, VlmRewardSpec
from wan_trainer.topology import (
    Topology,
    check_pending,
    pending_rewards_needed,
    replay_step_count,
    total_batches,
)
from wan_trainer.types import UserError


@dataclass(frozen=True)
class Workload:
    """The counts of one step on one rank, and the length of the run.

    rollout_calls, replay_calls: batched transformer calls; each replay call is a forward and a backward.
    stored_latents: of one rollout, the expected number of distinct latents that the replayed steps need.
    batches, updates: None when neither dataset_size nor max_steps says how long the run is. pending: rollouts
    that wait for a verdict at most. scorers, scorer_threads: of a node; requests in flight for a judge.
    """

    replayed_steps: int
    rollout_calls: int
    replay_calls: int
    stored_latents: float
    batches: int | None
    updates: int | None
    pending: int
    scorers: int
    scorer_threads: int


def count_work(spec: RunSpec, topology: Topology) -> Workload:
    """The work of `spec` on `topology`.

    Raises UserError when the run is too short for one update, or a scoring queue too short for a step.
    """
    sampler, grpo = spec.sampler, spec.grpo
    share = topology.rollouts_per_rank_wave
    replayed = replay_step_count(sampler.num_steps, sampler.replay_ratio)
    problem = _check_queue(spec.reward, topology, grpo.depth)
    if problem is not None:
        raise UserError(problem)
    batches = _count_batches(spec, topology)
    updates = None
    if batches is not None:
        updates = batches // spec.optimizer.gradient_accumulation_steps * grpo.updates_per_rollout
    # The ranks of one tensor-parallel group share their rollouts, and one of them submits.
    submitting = topology.nproc // topology.tp
    reward = spec.reward
    if isinstance(reward, RuleRewardSpec):
        scorers, threads = reward.workers * submitting, reward.threads_per_worker
    elif isinstance(reward, Target):
        scorers, threads = 0, 0  # the user's own keeps its own counts
    else:
        scorers, threads = reward.concurrency * submitting, 0
    return Workload(
        replayed_steps=replayed,
        rollout_calls=sampler.num_steps * math.ceil(share / grpo.sample_batch_size) * topology.waves,
        replay_calls=replayed
        * math.ceil(share / grpo.train_sample_batch_size)
        * topology.waves
        * grpo.updates_per_rollout,
        stored_latents=expected_latents(sampler.num_steps, replayed),
        batches=batches,
        updates=updates,
        pending=pending_rewards_needed(topology, grpo.depth),
        scorers=scorers,
        scorer_threads=scorers * threads,
    )


def expected_latents(num_steps: int, replayed: int) -> float:
    """Distinct latents that `replayed` steps drawn from the first num_steps - 1 need, on average.

    Step i needs latents i and i + 1. An inner latent is not needed when neither step beside it was drawn, the
    first and the last when their only step was not.
    """
    candidates = num_steps - 1
    left = candidates - replayed
    outer = left / candidates
    inner = outer * (left - 1) / (candidates - 1) if candidates > 1 else 0.0
    return (candidates + 1) - 2 * outer - (candidates - 1) * inner


def _count_batches(spec: RunSpec, topology: Topology) -> int | None:
    window, most = spec.optimizer.gradient_accumulation_steps, spec.stop.max_steps
    if spec.data.dataset_size is not None:
        epochs = spec.stop.num_epochs
        return total_batches(epochs, most, spec.data.dataset_size, topology.prompts, window)
    return None if most is None else most // window * window


def _check_queue(
    reward: RuleRewardSpec | VlmRewardSpec | Target, topology: Topology, depth: int
) -> str | None:
    if isinstance(reward, Target):
        return None
    name = "vbvr_reward" if isinstance(reward, RuleRewardSpec) else "vlm_reward"
    return check_pending(f"{name}_max_pending_jobs", reward.max_pending_jobs, topology, depth)
