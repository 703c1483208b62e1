"""The clipped surrogate and its gradient against float64 closed forms, and ratio statistics."""

import math

import pytest
import torch

from wan_trainer.objectives.surrogate import clipped_surrogate, ratio_statistics

CLIP = 1e-2


@pytest.mark.parametrize("log_ratio", [-0.5, -CLIP / 2, 0.0, CLIP / 2, 0.5])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 1.5])
def test_loss_and_gradient_match_the_definition(log_ratio: float, advantage: float) -> None:
    new = torch.tensor([log_ratio - 3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-3.0], dtype=torch.float64)
    loss = clipped_surrogate(new, old, torch.tensor([advantage], dtype=torch.float64), CLIP)
    loss.sum().backward()
    ratio = math.exp(log_ratio)
    bounded = min(max(ratio, 1 - CLIP), 1 + CLIP)
    assert loss.item() == pytest.approx(max(-advantage * ratio, -advantage * bounded), rel=1e-12)
    improves = (advantage > 0 and ratio > 1 + CLIP) or (advantage < 0 and ratio < 1 - CLIP)
    expected = 0.0 if improves else -advantage * ratio
    assert new.grad.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_each_sample_is_its_own_term() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn(3, 6, generator=generator, dtype=torch.float64) * 0.02
    whole = clipped_surrogate(new, old, advantages, CLIP)
    assert whole.shape == (6,)
    for n in range(6):
        alone = clipped_surrogate(new[n : n + 1], old[n : n + 1], advantages[n : n + 1], CLIP)
        assert torch.equal(alone, whole[n : n + 1])


def test_on_policy_gradient_is_the_policy_gradient_in_float32() -> None:
    new = torch.tensor([-1.25, -0.5], requires_grad=True)
    loss = clipped_surrogate(new, new.detach(), torch.tensor([0.75, -2.0]), 1e-4)
    loss.sum().backward()
    assert loss.tolist() == [-0.75, 2.0] and new.grad.tolist() == [-0.75, 2.0]


def test_statistics_match_python_and_skip_invalid_samples() -> None:
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5])
    new = old + torch.tensor([0.0, 3e-4, -0.02, 0.5])
    valid = torch.tensor([True, True, True, False])
    stats = ratio_statistics(new, old, valid, CLIP)
    logs = [n - o for n, o in zip(new.tolist(), old.tolist(), strict=True)]
    assert stats.ratio.item() == pytest.approx(sum(math.exp(d) for d in logs[:3]), rel=1e-12)
    assert stats.clipped.item() == 1
    assert stats.kl.item() == pytest.approx(sum(math.expm1(d) - d for d in logs[:3]), rel=1e-9)
    assert stats.deviation.item() == pytest.approx(math.expm1(logs[3]), rel=1e-12)
    assert not stats.ratio.requires_grad


def test_small_ratios_keep_their_digits() -> None:
    old = torch.tensor([-0.01], dtype=torch.float64)
    stats = ratio_statistics(old + 1e-7, old, torch.tensor([True]), CLIP)
    assert stats.deviation.item() == pytest.approx(1e-7, rel=1e-6)
    assert stats.kl.item() == pytest.approx(0.5e-14, rel=0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_ratio_that_is_not_finite_is_an_infinite_deviation(bad: float) -> None:
    stats = ratio_statistics(torch.tensor([0.0, bad]), torch.zeros(2), torch.tensor([True, True]), CLIP)
    assert stats.deviation.item() == math.inf
