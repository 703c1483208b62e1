"""The gradient of GRPO against an independent computation, and what it must not depend on."""

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
from wan_trainer.sampling.noise import initial_noise, step_noise
from wan_trainer.sampling.schedule import replay_steps, sigmas
from wan_trainer.types import SampleId

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
