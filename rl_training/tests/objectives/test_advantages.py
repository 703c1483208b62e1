"""Group advantages against Python's statistics module in float64."""

import math
import statistics

import pytest
import torch

from wan_trainer.objectives.advantages import flat_groups, group_advantages

NAN = float("nan")


def reference(rewards: list[float], valid: list[bool], clip: float) -> list[float]:
    kept = [r for r, v in zip(rewards, valid, strict=True) if v and math.isfinite(r)]
    if len(kept) < 2 or len(set(kept)) == 1:
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(kept), statistics.stdev(kept)
    return [
        max(-clip, min(clip, (r - mean) / (std + 1e-4))) if v and math.isfinite(r) else 0.0
        for r, v in zip(rewards, valid, strict=True)
    ]


@pytest.mark.parametrize("clip", [5.0, 1.0])
def test_advantages_match_float64(clip: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(16, 8, generator=generator, dtype=torch.float64)
    rewards[3] = 0.1
    rewards[4, 2:] = NAN
    rewards[5, 0] = float("inf")
    rewards[6] += 1000.0
    valid = torch.rand(16, 8, generator=generator) > 0.2
    valid[7] = False
    valid[8] = torch.arange(8) == 3
    advantages = group_advantages(rewards, valid, clip)
    expected = [reference(r, v, clip) for r, v in zip(rewards.tolist(), valid.tolist(), strict=True)]
    assert advantages.dtype == torch.float32 and advantages.shape == (16, 8)
    assert advantages.flatten().tolist() == pytest.approx([a for row in expected for a in row], abs=1e-6)
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "group",
    [
        [NAN, NAN, NAN],
        [0.1, 0.1, 0.1],
        [0.7, NAN, NAN],
        [0.3, 0.3, NAN],
        [float("inf"), 0.2, NAN],
    ],
)
def test_groups_without_a_preference_give_exactly_zero(group, dtype) -> None:
    rewards = torch.tensor([group], dtype=dtype)
    valid = torch.ones(1, 3, dtype=torch.bool)
    assert group_advantages(rewards, valid, 5.0).tolist() == [[0.0, 0.0, 0.0]]
    assert flat_groups(rewards, valid).tolist() == [True]


def test_a_group_of_one_is_zero_not_nan() -> None:
    assert group_advantages(torch.tensor([[0.4]]), torch.tensor([[True]]), 5.0).tolist() == [[0.0]]


def test_missing_members_leave_mean_and_std() -> None:
    rewards = torch.tensor([[0.2, 0.9, 0.5, 123.0], [0.2, 0.9, 0.5, NAN]])
    valid = torch.tensor([[True, True, True, False], [True, True, True, True]])
    three = group_advantages(rewards[:1, :3], valid[:1, :3], 5.0)
    assert torch.equal(group_advantages(rewards, valid, 5.0)[:, :3], three.expand(2, 3))
    assert not flat_groups(rewards, valid).any()


def test_reward_jitter_does_not_become_an_advantage() -> None:
    rewards = torch.tensor([[0.5, 0.5 + 1e-7, 0.5 - 1e-7, 0.5]], dtype=torch.float64)
    assert group_advantages(rewards, torch.ones(1, 4, dtype=torch.bool), 5.0).abs().max() < 2e-3


def test_one_outlier_is_clamped() -> None:
    rewards = torch.zeros(1, 64)
    rewards[0, 5] = 1.0
    advantages = group_advantages(rewards, torch.ones(1, 64, dtype=torch.bool), 5.0)
    assert advantages[0, 5] == 5.0
