"""One GRPO step: rewards, waves, records, repeated passes, group-wise eta, delayed replay."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from rl_training.tests.algorithms.parts import (
    GRPO,
    SAMPLER,
    Field,
    build,
    make_batch,
    relative_difference,
    without,
)
from wan_trainer.objectives.surrogate import clipped_surrogate
from wan_trainer.sampling.noise import group_eta
from wan_trainer.training.scheduler import ReplayScheduler
from wan_trainer.types import RewardResult, RunFailure, SampleId


def step(setup, batch=None):
    batch = batch or make_batch()
    record = setup.algorithm.update(setup.algorithm.prepare(batch, batch.step))
    assert record is not None
    return record


def test_the_record_says_what_happened() -> None:
    setup = build(alter=without((1, 2)), lr=0.25)
    record = step(setup)
    results = [r for table in setup.events.tables for row in table.results for r in row]
    rewards = [r.reward for r in results if r.valid]
    assert len(results) == 8 and len(rewards) == 7
    assert (record.step, record.batch, record.epoch) == (1, 3, 1)
    assert record.reward_mean == pytest.approx(statistics.fmean(rewards))
    assert record.reward_std == pytest.approx(statistics.stdev(rewards))
    assert record.reward_valid_fraction == 7 / 8
    brightness = [r.components["brightness"] for r in results if r.valid]
    assert record.components == {"brightness": pytest.approx(statistics.fmean(brightness))}
    assert record.replayed_steps == 3 and sum(record.replayed_per_expert.values()) == 3
    assert record.grad_norm == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in setup.updater.gradients[0].values()))
    )
    assert record.lr == 0.25 and record.policy_version == 1 and not record.skipped
    assert record.zero_std_groups == 0 and 0.5 < record.advantage_abs_mean < 1.5
    # On-policy the surrogate is minus the mean advantage, which is zero within each group.
    assert record.policy_loss == pytest.approx(0, abs=1e-6) and record.kl_loss == 0
    assert 0 < record.prepare_s <= record.step_s and record.replay_s > 0 and record.reward_wait_s >= 0
    assert record.rollouts_per_s == pytest.approx(8 / record.step_s)
    assert record.peak_memory_gib > 0.01


def test_rollouts_are_encoded_once_a_prompt_and_submitted_chunk_by_chunk() -> None:
    setup = build(prompts=4, wave=2, grpo=replace(GRPO, sample_batch_size=2))
    batch = make_batch(4)
    rollout = setup.algorithm.prepare(batch, batch.step)
    assert setup.encoded == [2, 2]
    assert [wave.prompts for wave in rollout.waves] == [(0, 1), (2, 3)]
    assert [len(wave.chunks) for wave in rollout.waves] == [4, 4]
    chunks = [chunk for wave in rollout.waves for chunk in wave.chunks]
    ids = [i for chunk in chunks for i in chunk.trajectory.ids]
    assert ids == [SampleId(3, prompt, member) for prompt in range(4) for member in range(4)]
    assert all(chunk.trajectory.x0 is None for chunk in chunks)
    assert all(len(chunk.condition.text) == 2 for chunk in chunks)
    phases = [event for event in setup.events.log if event in ("sample", "decode", "submit to reward")]
    assert phases == ["sample", "decode", "submit to reward"] * 8
    assert "result" not in setup.events.log
    latents = [latent for chunk in chunks for latent in chunk.trajectory.latents.values()]
    assert not any(latent.requires_grad or latent.is_inference() for latent in latents)


def test_later_waves_are_asked_for_only_after_earlier_ones_are_replayed() -> None:
    setup = build(prompts=4, wave=1)
    batch = make_batch(4)
    rollout = setup.algorithm.prepare(batch, batch.step)
    setup.events.log.clear()
    setup.algorithm.update(rollout)
    order = [e for e in setup.events.log if e in ("result", "rewards", "replay", "optimize")]
    assert order == ["result", "rewards", "replay"] * 4 + ["optimize"]


def swap(results: list[RewardResult]) -> list[RewardResult]:
    """Verdicts that name another prompt's member: what a scorer that permutes its batch would send."""
    return [replace(r, id=r.id._replace(prompt=1)) if r.id == SampleId(3, 0, 2) else r for r in results]


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda results: results[:-1], "no verdict on"),
        (lambda results: [*results, results[0]], "more than one verdict on"),
        (swap, "more than one verdict on"),
        (lambda results: [replace(r, id=r.id._replace(step=9)) for r in results], "no prompt of this wave"),
        (lambda results: [replace(r, id=r.id._replace(prompt=7)) for r in results], "no prompt of this wave"),
    ],
)
def test_verdicts_that_do_not_fit_the_samples_stop_the_run(alter, words) -> None:
    setup = build(alter=alter)
    with pytest.raises(RunFailure, match=words):
        step(setup)
    assert setup.updater.updates == 0


def test_too_many_missing_rewards_stop_the_run_after_they_are_recorded() -> None:
    setup = build(alter=without((0, 0), (1, 1)))
    with pytest.raises(RunFailure) as caught:
        step(setup)
    text = str(caught.value)
    assert "2 of 8 rewards of batch 3" in text and "scorer timed out (2x)" in text
    assert "reward_max_error_rate 0.2" in text and "prompt 0, member 0" in text and "\n" not in text
    assert len(setup.events.tables) == 1 and setup.updater.updates == 0


def test_a_tolerated_number_of_missing_rewards_is_counted() -> None:
    record = step(build(alter=without((0, 0), (1, 1)), grpo=replace(GRPO, reward_max_error_rate=0.25)))
    assert record.reward_valid_fraction == 0.75 and math.isfinite(record.grad_norm)


def test_the_error_rate_is_of_the_whole_step_not_of_a_wave() -> None:
    missing = ((0, 0), (0, 1))
    grpo = replace(GRPO, reward_max_error_rate=0.2)
    assert step(build(prompts=4, wave=1, alter=without(*missing), grpo=grpo), make_batch(4)).step == 1
    with pytest.raises(RunFailure, match="4 of 16"):
        step(build(prompts=4, wave=1, alter=without(*missing, (3, 0), (3, 1)), grpo=grpo), make_batch(4))


def test_fail_on_reward_error_stops_at_the_first() -> None:
    grpo = replace(GRPO, fail_on_reward_error=True, reward_max_error_rate=1.0)
    with pytest.raises(RunFailure, match=r"1 of 8 .*vbvr_reward_fail_on_error"):
        step(build(alter=without((1, 3)), grpo=grpo))
    judge = replace(grpo, fail_on_reward_error_key="vlm_reward_fail_on_error")
    with pytest.raises(RunFailure, match=r"1 of 8 .*vlm_reward_fail_on_error allows none") as caught:
        step(build(alter=without((1, 3), error="judge: broken JSON"), grpo=judge))
    assert "vbvr" not in str(caught.value)
    assert step(build(grpo=grpo)).step == 1


def test_a_reward_that_is_not_finite_is_missing() -> None:
    def infinite(results: list[RewardResult]) -> list[RewardResult]:
        return [replace(r, reward=math.inf) if r.id.member == 0 and r.id.prompt == 0 else r for r in results]

    record = step(build(alter=infinite))
    assert record.reward_valid_fraction == 7 / 8 and math.isfinite(record.reward_mean)


def test_groups_without_spread_contribute_nothing_and_are_counted() -> None:
    def flat(results: list[RewardResult]) -> list[RewardResult]:
        return [replace(r, reward=0.3) if r.id.prompt == 0 else r for r in results]

    setup = build(alter=flat)
    record = step(setup)
    assert record.zero_std_groups == 1
    only = build(alter=without(*((0, m) for m in range(4))), grpo=replace(GRPO, reward_max_error_rate=1.0))
    step(only)
    assert relative_difference(setup.updater.gradients[0], only.updater.gradients[0]) == 0


def test_one_update_changes_the_weights_against_the_gradient() -> None:
    setup = build(lr=0.5)
    before = {name: p.detach().clone() for name, p in setup.policy.named_parameters()}
    step(setup)
    for name, p in setup.policy.named_parameters():
        assert p.detach() == pytest.approx(before[name] - 0.5 * setup.updater.gradients[0][name])


def test_the_reward_rises_whichever_way_it_points() -> None:
    def negated(results: list[RewardResult]) -> list[RewardResult]:
        return [replace(r, reward=-r.reward) for r in results]

    outcomes = []
    grpo = replace(GRPO, group_size=16, sample_batch_size=32, train_sample_batch_size=32, clip_range=1e-2)
    for alter in (lambda results: results, negated):
        setup = build(lr=30.0, grpo=grpo, alter=alter)
        means = [step(setup, make_batch(step=i)).reward_mean for i in range(16)]
        outcomes.append(statistics.fmean(means[-4:]) - statistics.fmean(means[:4]))
    # The second reward is the negated brightness: that it rises too means that brightness falls.
    assert outcomes[0] > 0.02 and outcomes[1] > 0.02


def test_updates_per_rollout_pass_several_times_over_the_same_rollout() -> None:
    twice = build(lr=0.2, grpo=replace(GRPO, updates_per_rollout=2, clip_range=1e-6))
    record = step(twice)
    assert (record.step, record.policy_version, twice.updater.updates) == (2, 2, 2)
    assert record.policy_age == 0 and record.ratio_max_dev == 0
    # The second pass is off-policy and clips at this range; the first never does: half of all ratios at most.
    assert 0 < record.clip_fraction <= 0.5 and record.approx_kl > 0

    once = build(lr=0.2)
    step(once)
    assert relative_difference(twice.updater.gradients[0], once.updater.gradients[0]) == 0
    assert relative_difference(twice.updater.gradients[1], once.updater.gradients[0]) > 1e-3


def test_the_second_pass_uses_the_old_log_probs_of_the_rollout() -> None:
    """With a wide clip range its gradient is -adv * ratio * dlog_prob at the new weights: compare by hand."""
    grpo = replace(GRPO, updates_per_rollout=2, clip_range=10.0, ratio_gate_tolerance=1e-5)
    setup = build(lr=0.2, grpo=grpo)
    batch = make_batch()
    rollout = setup.algorithm.prepare(batch, batch.step)
    setup.algorithm.update(rollout)

    policy = Field()
    with torch.no_grad():
        for name, p in policy.named_parameters():
            p -= 0.2 * setup.updater.gradients[0][name]
    table = setup.events.tables[0]
    loss = torch.zeros(())
    for chunk in rollout.waves[0].chunks:
        for stored in chunk.trajectory.steps:
            s, s1 = stored.sigma, stored.sigma_next
            x, x1 = chunk.trajectory.latents[stored.index], chunk.trajectory.latents[stored.index + 1]
            v = policy.velocity(x, s, chunk.condition)
            kept = s1 * math.cos(0.7 * math.pi / 2)
            mean = (1 - s1) * (x - s * v) + kept * (x + (1 - s) * v)
            new = -(x1 - mean).square().mean(dim=(1, 2, 3, 4))
            for n, i in enumerate(chunk.trajectory.ids):
                group = [r.reward for r in table.results[i.prompt]]
                adv = (group[i.member] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4)
                loss = loss - adv * (new[n] - stored.old_log_prob[n]).exp()
    (loss / (2 * 4 * 3)).backward()
    expected = {name: p.grad for name, p in policy.named_parameters()}
    assert relative_difference(setup.updater.gradients[1], expected) < 1e-4


def test_accumulation_with_several_passes_replays_the_whole_window_each_time() -> None:
    setup = build(lr=0.1, accumulation=2, grpo=replace(GRPO, updates_per_rollout=2, clip_range=1.0))
    first = setup.algorithm.prepare(make_batch(step=3), 3)
    second = setup.algorithm.prepare(make_batch(step=4), 4)
    assert setup.algorithm.update(first) is None
    record = setup.algorithm.update(second)
    assert record is not None and record.step == 2 and record.batch == 4 and record.replayed_steps == 6
    assert len(setup.updater.gradients) == 2 and len(setup.events.tables) == 2
    assert record.ratio_max_dev == 0 and record.rollouts_per_s == pytest.approx(16 / record.step_s)


def test_a_skipped_update_changes_no_version() -> None:
    setup = build()
    setup.policy.mix["transformer"].register_hook(lambda gradient: gradient * float("nan"))
    record = step(setup)
    assert record.skipped and record.step == 1 and record.policy_version == 0
    assert setup.algorithm.policy_version == 0 and math.isnan(record.grad_norm)


def test_a_loss_that_is_not_finite_skips_the_update_whatever_its_gradient() -> None:
    setup = build()
    replayer = setup.algorithm._replayer
    replayer._loss = lambda *arguments: clipped_surrogate(*arguments) + float("inf")
    record = step(setup)
    assert record.skipped and record.policy_loss == math.inf and math.isfinite(record.grad_norm)
    assert not setup.updater.gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eta_zero_groups_have_no_gradient_and_are_counted(dtype) -> None:
    sampler = replace(SAMPLER, eta_range=(0.0, 0.0), share_group_init_noise=False, trajectory_dtype=dtype)
    setup = build(sampler=sampler)
    record = step(setup)
    assert record.reward_std > 1e-3 and record.zero_std_groups == 2 and record.ratio_max_dev == 0
    assert all((g == 0).all() for g in setup.updater.gradients[0].values())


def test_group_wise_eta_is_shared_by_a_group_and_replayed() -> None:
    setup = build(sampler=replace(SAMPLER, eta_range=(0.1, 0.9)))
    batch = make_batch()
    rollout = setup.algorithm.prepare(batch, batch.step)
    for prompt, chunk in enumerate(rollout.waves[0].chunks):
        expected = group_eta(SAMPLER.seed, [SampleId(3, prompt, 0)], 0.7, (0.1, 0.9))
        assert (chunk.trajectory.eta == expected).all()
    record = setup.algorithm.update(rollout)
    assert record is not None and record.ratio_max_dev == 0 and record.zero_std_groups == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_delayed_replay_trains_every_batch_at_the_age_of_its_depth(depth) -> None:
    setup = build(lr=0.05)
    scheduler = ReplayScheduler(setup.algorithm.prepare, setup.algorithm.update, depth)
    records = [r for i in range(5) for r in scheduler.push(make_batch(step=i), i)]
    records += scheduler.drain()
    assert [record.batch for record in records] == list(range(5))
    assert [record.policy_age for record in records] == [min(i, depth) for i in range(5)]
    assert [record.step for record in records] == [1, 2, 3, 4, 5]


def test_depth_zero_is_bit_equal_to_calling_the_halves_in_turn() -> None:
    direct, scheduled = build(lr=0.1), build(lr=0.1)
    scheduler = ReplayScheduler(scheduled.algorithm.prepare, scheduled.algorithm.update, 0)
    for i in range(3):
        step(direct, make_batch(step=i))
        list(scheduler.push(make_batch(step=i), i))
    for one, other in zip(direct.policy.parameters(), scheduled.policy.parameters(), strict=True):
        assert torch.equal(one, other)
