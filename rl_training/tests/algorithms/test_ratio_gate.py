"""Replay reproduces the rollout exactly; where it does not, the run stops before its first update."""

from dataclasses import replace

import pytest
import torch

from rl_training.tests.algorithms.parts import GRPO, SAMPLER, build, make_batch
from wan_trainer.algorithms.ratio_gate import RatioGateError
from wan_trainer.sampling.schedule import replay_steps, sigmas
from wan_trainer.types import Chunk, Rollout

KINDS = ["flowcps", "dancegrpo", "flowgrpo"]


def map_chunks(rollout: Rollout, change) -> Rollout:
    waves = tuple(replace(wave, chunks=tuple(change(c) for c in wave.chunks)) for wave in rollout.waves)
    return replace(rollout, waves=waves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ratio_of_an_unchanged_policy_is_exactly_one(kind, dtype) -> None:
    setup = build(sampler=replace(SAMPLER, kind=kind, trajectory_dtype=dtype), prompts=2, wave=1)
    batch = make_batch()
    record = setup.algorithm.update(setup.algorithm.prepare(batch, batch.step))
    assert record is not None
    assert record.ratio_max_dev == 0 and record.ratio_mean == 1 and record.clip_fraction == 0
    assert record.approx_kl == 0 and record.policy_age == 0


def test_new_and_old_log_probs_come_from_two_forwards() -> None:
    setup = build(prompts=2)
    batch = make_batch()
    kept = replay_steps(6, 0.6, SAMPLER.seed, batch.step)
    grid = sigmas(6, 3.0).tolist()
    rollout = setup.algorithm.prepare(batch, batch.step)
    assert setup.policy.calls == [(s, 4, False) for _ in range(2) for s in grid[:-1]]
    setup.policy.calls.clear()
    assert setup.algorithm.update(rollout) is not None
    assert setup.policy.calls == [(grid[i], 4, True) for _ in range(2) for i in kept]


@pytest.mark.parametrize("kind", KINDS)
def test_a_perturbed_replay_sigma_trips_the_gate_before_the_weights_change(kind) -> None:
    setup = build(sampler=replace(SAMPLER, kind=kind), lr=0.1)
    setup.policy.sigma_offset = 1e-3
    before = {name: p.detach().clone() for name, p in setup.policy.named_parameters()}
    batch = make_batch()
    rollout = setup.algorithm.prepare(batch, batch.step)
    with pytest.raises(RatioGateError) as caught:
        setup.algorithm.update(rollout)
    assert setup.updater.updates == 0
    assert all(torch.equal(before[name], p) for name, p in setup.policy.named_parameters())
    text = str(caught.value)
    table = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [int(row[0]) for row in table] == replay_steps(6, 0.6, SAMPLER.seed, batch.step)
    assert all(row[3].startswith("transformer") and float(row[5]) > 0 for row in table)
    for suspect in ("compile", "attention kernel", "chunk shape", "store dtype", "ratio_gate_tolerance"):
        assert suspect in text


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_taken_before_the_bf16_store_trip_the_gate(kind) -> None:
    setup = build(sampler=replace(SAMPLER, kind=kind))

    def round_afterwards(chunk: Chunk) -> Chunk:
        latents = {index: latent.bfloat16() for index, latent in chunk.trajectory.latents.items()}
        return replace(chunk, trajectory=replace(chunk.trajectory, latents=latents))

    batch = make_batch()
    rollout = map_chunks(setup.algorithm.prepare(batch, batch.step), round_afterwards)
    with pytest.raises(RatioGateError):
        setup.algorithm.update(rollout)


def test_a_forgotten_group_eta_trips_the_gate() -> None:
    setup = build(sampler=replace(SAMPLER, eta_range=(0.2, 0.9)))

    def forget(chunk: Chunk) -> Chunk:
        eta = torch.full_like(chunk.trajectory.eta, 0.7)
        return replace(chunk, trajectory=replace(chunk.trajectory, eta=eta))

    batch = make_batch()
    with pytest.raises(RatioGateError):
        setup.algorithm.update(map_chunks(setup.algorithm.prepare(batch, batch.step), forget))


def test_a_ratio_that_is_not_a_number_trips_the_gate() -> None:
    setup = build()

    def poison(chunk: Chunk) -> Chunk:
        first, *others = chunk.trajectory.steps
        bad = replace(first, old_log_prob=first.old_log_prob * float("nan"))
        return replace(chunk, trajectory=replace(chunk.trajectory, steps=(bad, *others)))

    batch = make_batch()
    with pytest.raises(RatioGateError, match="inf"):
        setup.algorithm.update(map_chunks(setup.algorithm.prepare(batch, batch.step), poison))


def test_the_gate_looks_at_age_zero_only_and_stale_rollouts_have_their_own_clip_range() -> None:
    grpo = replace(GRPO, clip_range=1e-7, stale_clip_range=1e3, ratio_gate_tolerance=1e-12)
    setup = build(lr=5.0, grpo=grpo)
    batch = make_batch()
    first = setup.algorithm.prepare(batch, 3)
    second = setup.algorithm.prepare(make_batch(step=4), 4)
    fresh = setup.algorithm.update(first)
    stale = setup.algorithm.update(second)
    assert fresh is not None and stale is not None
    assert (fresh.policy_age, stale.policy_age) == (0, 1)
    assert (fresh.policy_version, stale.policy_version) == (1, 2)
    assert fresh.ratio_max_dev == 0 and stale.ratio_max_dev > 1e-4
    # Every ratio moved further than the on-policy range and none further than the stale one.
    assert stale.clip_fraction == 0


def test_the_tolerance_is_configurable() -> None:
    setup = build(grpo=replace(GRPO, ratio_gate_tolerance=10.0))
    setup.policy.sigma_offset = 1e-3
    batch = make_batch()
    record = setup.algorithm.update(setup.algorithm.prepare(batch, batch.step))
    assert record is not None and record.ratio_max_dev > 1e-6
