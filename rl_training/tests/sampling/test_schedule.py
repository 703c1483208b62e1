"""The sigma grid against exact rationals, and the choice of replayed steps."""

from collections import Counter
from fractions import Fraction

import pytest
import torch

from wan_trainer.sampling.schedule import replay_steps, sigmas


@pytest.mark.parametrize(("num_steps", "shift"), [(1, 5), (4, 1), (10, 3), (30, 5)])
def test_grid_is_the_shifted_uniform_one(num_steps: int, shift: int) -> None:
    expected = []
    for i in range(num_steps + 1):
        t = 1 - Fraction(i, num_steps)
        expected.append(float(shift * t / (1 + (shift - 1) * t)))
    grid = sigmas(num_steps, shift)
    assert grid.dtype == torch.float32
    assert grid.tolist() == torch.tensor(expected, dtype=torch.float64).float().tolist()
    assert grid[0] == 1 and grid[-1] == 0


def test_replayed_steps_are_pure_distinct_and_never_the_last() -> None:
    steps = replay_steps(30, 0.6, seed=3, step=11)
    assert len(steps) == len(set(steps)) == 17
    assert steps == sorted(steps) and steps[0] >= 0 and steps[-1] <= 28
    assert steps == replay_steps(30, 0.6, seed=3, step=11)
    assert all(type(index) is int for index in steps)


def test_replayed_steps_change_with_seed_and_step_and_cover_every_candidate() -> None:
    draws = [tuple(replay_steps(30, 0.6, seed, step)) for seed in (0, 1) for step in range(200)]
    assert len(set(draws)) == 400
    counts = Counter(index for draw in draws for index in draw)
    # 400 draws of 17 out of 29: each index is expected 234 times, with a standard deviation of 10.
    assert set(counts) == set(range(29))
    assert all(180 < count < 290 for count in counts.values())


def test_replayed_steps_keep_at_least_one_and_at_most_all_candidates() -> None:
    assert len(replay_steps(30, 0.001, 0, 0)) == 1
    assert replay_steps(30, 1.0, 0, 0) == list(range(29))
    assert replay_steps(2, 0.1, 0, 0) == [0]
