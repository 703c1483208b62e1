"""How much work a step is: calls, replayed steps, stored latents, and how long the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wan_trainer.config.specs import RewardSpec, RunSpec
from wan_trainer.planning.refl import count_refl
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

    rollout_calls, replay_calls: batched transformer calls; each replay call is a forward and a backward. In
    ReFL the steps with a gradient count as replayed, and every call without one as a rollout's; at most.
    stored_latents: of one rollout, the expected number of distinct latents that the replayed steps need.
    batches, updates: None when neither dataset_size nor max_steps says how long the run is. pending: rollouts
    that wait for a verdict at most. scorers, scorer_threads: processes of the rule reward on a node, and
    their threads; requests: those in flight to a judge from a node.
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
    requests: int


def count_work(spec: RunSpec, topology: Topology) -> Workload:
    """The work of `spec` on `topology`.

    Raises UserError when the run is too short for one update, or a scoring queue too short for a step.
    """
    sampler, grpo = spec.sampler, spec.grpo
    share = topology.rollouts_per_rank_wave
    replayed = replay_step_count(sampler.num_steps, sampler.replay_ratio)
    problems = _check_queues(spec.reward, topology, grpo.depth)
    if problems:
        raise UserError(*problems)
    batches = _count_batches(spec, topology)
    updates = None
    if batches is not None:
        updates = batches // spec.optimizer.gradient_accumulation_steps * grpo.updates_per_rollout
    if spec.refl is not None:
        calls = count_refl(spec, spec.refl, topology)
        return Workload(
            replayed_steps=calls.grad_steps,
            rollout_calls=calls.sampling + calls.beside,
            replay_calls=calls.backward,
            stored_latents=calls.grad_steps + 1,  # and the clean one
            batches=batches,
            updates=updates,
            pending=0,
            scorers=0,
            scorer_threads=0,
            requests=0,
        )
    # The ranks of one tensor-parallel group share their rollouts, and one of them submits.
    submitting = topology.nproc // topology.tp
    # The user's own rewards keep counts of their own.
    rule, judge = spec.reward.rule, spec.reward.judge
    scorers = 0 if rule is None else rule.workers * submitting
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
        scorer_threads=0 if rule is None else scorers * rule.threads_per_worker,
        requests=0 if judge is None else judge.concurrency * submitting,
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


def _check_queues(reward: RewardSpec, topology: Topology, depth: int) -> list[str]:
    queues = {"vbvr_reward_max_pending_jobs": reward.rule, "vlm_reward_max_pending_jobs": reward.judge}
    checked = (
        check_pending(key, part.max_pending_jobs, topology, depth)
        for key, part in queues.items()
        if part is not None
    )
    return [problem for problem in checked if problem is not None]
