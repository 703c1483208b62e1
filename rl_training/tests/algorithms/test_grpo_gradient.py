"""The gradient of GRPO against an independent computation, and what it must not depend on."""

import math
from dataclasses import replace

import pytest
import torch

from rl_training.tests.algorithms.parts import (
    GRPO,
    SAMPLER,
    SHAPE,
    Field,
    build,
    decode,
    encode,
    make_batch,
    relative_difference,
    without,
)
from wan_trainer.algorithms.ratio_gate import RatioGateError
from wan_trainer.sampling.noise import initial_noise, step_noise
from wan_trainer.sampling.schedule import replay_steps, sigmas
from wan_trainer.types import Condition, Rollout, SampleId

KINDS = ["flowcps", "dancegrpo", "flowgrpo"]


def reference_gradient(
    prompts: int = 2, missing: tuple[tuple[int, int], ...] = ()
) -> dict[str, torch.Tensor]:
    """flowcps on-policy gradient, sample by sample, by the formulas: -adv * dlog_prob / (P*G*S)."""
    policy, batch, group = Field(), make_batch(prompts), GRPO.group_size
    grid = sigmas(6, 3.0).tolist()
    kept = replay_steps(6, 0.6, SAMPLER.seed, batch.step)
    angle = torch.tensor(0.7) * torch.pi / 2
    rewards, terms = {}, {}
    for prompt in range(prompts):
        condition = encode([batch.samples[prompt]], None)
        for member in range(group):
            ids = [SampleId(batch.step, prompt, member)]
            x = initial_noise(SAMPLER.seed, ids, SHAPE, shared=True)
            log_probs = []
            for i in range(6):
                s, s1 = grid[i], grid[i + 1]
                v = policy.velocity(x.detach(), s, condition)
                mean = (1 - s1) * (x - s * v) + s1 * torch.cos(angle) * (x + (1 - s) * v)
                noise = 0 if i == 5 else s1 * torch.sin(angle) * step_noise(SAMPLER.seed, ids, i, SHAPE)
                x = (mean + noise).detach()
                if i in kept:
                    log_probs.append(-(x - mean).square().mean())
            rewards[prompt, member] = float(decode(x)[..., 0].mean()) / 255
            terms[prompt, member] = sum(log_probs)
    loss = torch.zeros(())
    for prompt in range(prompts):
        valid = [(prompt, m) for m in range(group) if (prompt, m) not in missing]
        values = torch.tensor([rewards[key] for key in valid], dtype=torch.float64)
        for key, value in zip(valid, values, strict=True):
            loss = loss - (value - values.mean()) / (values.std() + 1e-4) * terms[key]
    (loss / (prompts * group * len(kept))).backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("missing", [(), ((0, 1),), ((0, 0), (0, 3))])
def test_gradient_equals_the_formula(missing) -> None:
    setup = build(alter=without(*missing), grpo=replace(GRPO, reward_max_error_rate=0.5))
    assert relative_difference(setup.gradient(), reference_gradient(2, missing)) < 1e-5


def test_missing_members_do_not_change_the_weight_of_others() -> None:
    """With one group missing altogether, the rest counts exactly as much as before: not a bit more."""
    grpo = replace(GRPO, reward_max_error_rate=1.0)
    whole = build(grpo=grpo).gradient()
    first, second = (
        build(grpo=grpo, alter=without(*((other, m) for m in range(4)))).gradient() for other in (1, 0)
    )
    assert relative_difference({n: first[n] + second[n] for n in first}, whole) < 1e-5
    assert all(g.norm() > 1e-6 for part in (first, second) for g in part.values())


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_does_not_depend_on_chunk_or_wave_size(kind) -> None:
    sampler = replace(SAMPLER, kind=kind)
    tolerant = replace(GRPO, ratio_gate_tolerance=1e-4)
    base = build(sampler=sampler, grpo=tolerant, prompts=4).gradient(make_batch(4))
    for draw, train, wave in ((1, 1, 4), (4, 3, 4), (16, 4, 4), (3, 5, 4), (4, 4, 1), (2, 8, 2), (8, 3, 2)):
        grpo = replace(tolerant, sample_batch_size=draw, train_sample_batch_size=train)
        setup = build(sampler=sampler, grpo=grpo, prompts=4, wave=wave)
        assert relative_difference(setup.gradient(make_batch(4)), base) < 1e-5, (draw, train, wave)


def test_order_of_verdicts_within_a_submission_does_not_matter() -> None:
    base = build().gradient()
    assert relative_difference(build(alter=lambda results: results[::-1]).gradient(), base) == 0


def test_accumulation_equals_one_large_batch() -> None:
    large = build(prompts=4, wave=2)
    batch = make_batch(4)
    rollout = large.algorithm.prepare(batch, batch.step)
    assert large.algorithm.update(rollout) is not None

    small = build(prompts=4, wave=2, accumulation=2, policy=Field())
    rollout = small.algorithm.prepare(batch, batch.step)
    half = replace(batch, samples=batch.samples[:2])
    parts = [replace(rollout, batch=half, waves=(wave,)) for wave in rollout.waves]
    assert small.algorithm.update(parts[0]) is None
    assert small.updater.updates == 0 and small.algorithm.policy_version == 0
    record = small.algorithm.update(parts[1])
    assert record is not None and record.step == 1 and record.reward_valid_fraction == 1
    assert relative_difference(small.updater.gradients[-1], large.updater.gradients[-1]) < 1e-6
    # Each rollout of the window ends with a reduction for each of its experts.
    assert small.updater.syncs.count(True) == 2 * large.updater.syncs.count(True)


def test_every_expert_is_synchronised_at_its_own_last_backward() -> None:
    setup = build(prompts=4, wave=2, grpo=replace(GRPO, train_sample_batch_size=2))
    setup.gradient(make_batch(4))
    backward = [sigma for sigma, _, grad in setup.policy.calls if grad]
    assert len(backward) == len(setup.updater.syncs)
    experts = [setup.policy.expert_for(sigma) for sigma in backward]
    assert set(experts) == {"transformer", "transformer_2"}
    last = {len(experts) - 1 - experts[::-1].index(name) for name in set(experts)}
    assert {i for i, sync in enumerate(setup.updater.syncs) if sync} == last


def test_kl_to_a_frozen_reference_enters_loss_and_gradient() -> None:
    reference = Field()
    same = build(grpo=replace(GRPO, kl_coeff=3.0), reference=_inference(reference))
    plain = build().gradient()
    assert relative_difference(same.gradient(), plain) < 1e-6

    moved = Field(seed=1)
    setup = build(grpo=replace(GRPO, kl_coeff=3.0), reference=_inference(moved))
    batch = make_batch()
    record = setup.algorithm.update(setup.algorithm.prepare(batch, batch.step))
    assert record is not None and record.kl_loss > 0
    assert relative_difference(setup.updater.gradients[-1], plain) > 1e-2
    with pytest.raises(AssertionError, match="reference"):
        build(grpo=replace(GRPO, kl_coeff=3.0))


def _inference(policy: Field):
    policy.eval()
    return policy.velocity


def test_kl_loss_is_the_mean_squared_distance_of_means() -> None:
    moved = Field(seed=1)
    setup = build(grpo=replace(GRPO, kl_coeff=1.0), reference=_inference(moved))
    batch = make_batch()
    rollout = setup.algorithm.prepare(batch, batch.step)
    total, count = 0.0, 0
    for chunk in rollout.waves[0].chunks:
        for step in chunk.trajectory.steps:
            x, s, s1 = chunk.trajectory.latents[step.index], step.sigma, step.sigma_next
            keep = s1 * torch.cos(torch.tensor(0.7) * torch.pi / 2)
            # The mean is affine in the velocity: its change is the velocity's times this factor.
            factor = -(1 - s1) * s + keep * (1 - s)
            with torch.no_grad():
                change = setup.policy.velocity(x, s, chunk.condition) - moved.velocity(x, s, chunk.condition)
            total += float((factor * change).square().mean(dim=(1, 2, 3, 4)).sum())
            count += len(x)
    record = setup.algorithm.update(rollout)
    assert record is not None and record.kl_loss == pytest.approx(total / count, rel=1e-4)


def _kl_gradient(
    kind: str, rollout: Rollout, missing: tuple[tuple[int, int], ...]
) -> dict[str, torch.Tensor]:
    """In float64: sum of mean((c * (v - v_ref))^2) / weight over valid samples and steps, over P * G * S.

    c is the derivative of the transition's mean in the velocity, written out per transition kind; weight is
    2 * std^2 for the Gaussian ones, 1 for flowcps.
    """
    policy, frozen = Field().double(), Field(seed=1).double()
    policy.train()
    frozen.train()
    total, terms = torch.zeros((), dtype=torch.float64), 0
    for wave in rollout.waves:
        for chunk in wave.chunks:
            trajectory, text = chunk.trajectory, chunk.condition.text.double()
            for step in trajectory.steps:
                s, s1 = step.sigma, step.sigma_next
                x = trajectory.latents[step.index].double()
                condition = Condition(text)
                change = policy.velocity(x, s, condition) - frozen.velocity(x, s, condition).detach()
                eta = trajectory.eta.double()[0]
                if kind == "flowcps":
                    slope, weight = -(1 - s1) * s + s1 * torch.cos(eta * torch.pi / 2) * (1 - s), 1.0
                else:
                    level = s if s < 1 else s1
                    g2 = eta**2 if kind == "dancegrpo" else eta**2 * level / (1 - level)
                    dt = s1 - s
                    slope, weight = dt + 0.5 * g2 * dt * (1 - s) / s, 2 * g2 * -dt
                divergence = (slope * change).square().flatten(1).mean(1) / weight
                valid = torch.tensor([(i.prompt, i.member) not in missing for i in trajectory.ids])
                total = total + torch.where(valid, divergence, 0.0).sum()
                terms += len(trajectory.ids)
    (total / terms).backward()
    return {name: p.grad.float() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_gradient_equals_the_formula_in_float64_for_every_chunk_size(kind) -> None:
    missing = ((1, 2),)
    sampler = replace(SAMPLER, kind=kind, eta=0.6)
    grpo = replace(GRPO, reward_max_error_rate=0.5, ratio_gate_tolerance=1e-4)
    for chunk in (4, 1, 3, 8):
        gradients, records = [], []
        for coefficient in (0.0, 2.0):
            spec = replace(grpo, kl_coeff=coefficient, train_sample_batch_size=chunk)
            reference = _inference(Field(seed=1)) if coefficient else None
            setup = build(sampler=sampler, grpo=spec, alter=without(*missing), reference=reference)
            batch = make_batch()
            rollout = setup.algorithm.prepare(batch, batch.step)
            records.append(setup.algorithm.update(rollout))
            gradients.append(setup.updater.gradients[-1])
        expected = _kl_gradient(kind, rollout, missing)
        measured = {name: (gradients[1][name] - gradients[0][name]) / 2.0 for name in gradients[0]}
        assert relative_difference(measured, expected) < 1e-4, (kind, chunk)
        assert records[0].kl_loss == 0 and records[1].kl_loss > 0


def test_the_reference_is_asked_before_the_policy_and_without_gradients() -> None:
    """A reference that shares the policy's modules must not come between a forward and its backward."""
    reference, policy = Field(seed=1), Field()
    reference.eval()
    order: list[str] = []

    def velocity(*arguments, **options):
        order.append("reference")
        assert not torch.is_grad_enabled()
        return reference.velocity(*arguments, **options)

    original = policy.velocity

    def traced(*arguments, **options):
        order.append("policy")
        return original(*arguments, **options)

    policy.velocity = traced
    setup = build(policy=policy, grpo=replace(GRPO, kl_coeff=1.0), reference=velocity)
    batch = make_batch()
    rollout = setup.algorithm.prepare(batch, batch.step)
    order.clear()
    setup.algorithm.update(rollout)
    assert order == ["reference", "policy"] * (len(order) // 2) and order


def test_steps_of_a_frozen_expert_run_no_forward_and_keep_the_constant() -> None:
    """What the other expert learns is bit for bit what it learns when both are trained."""
    both, half = build(), build()
    half.policy.freeze("transformer")
    batch = make_batch()
    kept = replay_steps(6, 0.6, SAMPLER.seed, batch.step)
    levels = [sigmas(6, 3.0).tolist()[i] for i in kept]
    assert {both.policy.expert_for(s) for s in levels} == {"transformer", "transformer_2"}
    records = {}
    for setup in (both, half):
        rollout = setup.algorithm.prepare(batch, batch.step)
        setup.policy.calls.clear()
        records[setup is half] = setup.algorithm.update(rollout)
    low = [s for s in levels if both.policy.expert_for(s) == "transformer_2"]
    assert [s for s, _, _ in half.policy.calls] == low * 2
    for name, gradient in half.updater.gradients[-1].items():
        expected = both.updater.gradients[-1][name]
        assert torch.equal(gradient, expected if name.endswith("transformer_2") else 0 * expected), name
    record = records[True]
    assert record.replayed_steps == len(kept) and record.frozen_steps == len(kept) - len(low)
    assert record.replayed_samples == 8 * len(low) and record.ratio_max_dev == 0 and record.ratio_mean == 1
    assert records[False].frozen_steps == 0 and records[False].replayed_samples == 8 * len(kept)
    # Each expert that is trained still ends with a reduction.
    assert half.updater.syncs.count(True) == 1 and len(half.updater.syncs) == 2 * len(low)


def test_a_rollout_of_frozen_steps_only_changes_nothing_and_leaves_the_gate_to_the_next() -> None:
    sampler = replace(SAMPLER, replay_ratio=0.2)
    grid = sigmas(6, 3.0).tolist()
    noise = {step: grid[replay_steps(6, 0.2, SAMPLER.seed, step)[0]] for step in range(50)}
    high = next(step for step, sigma in noise.items() if sigma >= 0.9)
    low = next(step for step, sigma in noise.items() if sigma < 0.9)
    setup = build(sampler=sampler, lr=0.1)
    setup.policy.freeze("transformer")
    before = {name: p.detach().clone() for name, p in setup.policy.named_parameters()}
    record = setup.algorithm.update(setup.algorithm.prepare(make_batch(step=high), high))
    assert record is not None and record.skipped and record.policy_version == 0
    assert record.frozen_steps == record.replayed_steps == 1 and record.replayed_samples == 0
    assert math.isnan(record.ratio_mean) and math.isnan(record.ratio_max_dev), "nobody computed a ratio"
    assert all(torch.equal(before[name], p) for name, p in setup.policy.named_parameters())
    # The policy is still the one of the start, so a replay that differs is still found.
    setup.policy.sigma_offset = 1e-3
    with pytest.raises(RatioGateError):
        setup.algorithm.update(setup.algorithm.prepare(make_batch(step=low), low))
