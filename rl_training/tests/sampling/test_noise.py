"""Keyed noise: pure, independent of how samples are grouped, and never shared by accident."""

import itertools

import numpy as np
import pytest
import torch

from wan_trainer.sampling.noise import group_eta, initial_noise, keyed_generator, step_noise
from wan_trainer.types import SampleId

SHAPE = (2, 3, 4, 4)
IDS = [SampleId(5, prompt, member) for prompt in range(3) for member in range(4)]


def test_noise_is_the_same_in_any_chunk_and_order() -> None:
    whole_initial = initial_noise(1, IDS, SHAPE, shared=False)
    whole_step = step_noise(1, IDS, 7, SHAPE)
    for size in (1, 5, 12):
        parts = [IDS[i : i + size] for i in range(0, len(IDS), size)]
        assert torch.equal(
            torch.cat([initial_noise(1, p, SHAPE, shared=False) for p in parts]), whole_initial
        )
        assert torch.equal(torch.cat([step_noise(1, p, 7, SHAPE) for p in parts]), whole_step)
    order = [7, 2, 11]
    assert torch.equal(step_noise(1, [IDS[i] for i in order], 7, SHAPE), whole_step[order])


def test_every_part_of_the_key_matters() -> None:
    base = step_noise(1, [SampleId(5, 2, 3)], 7, SHAPE)
    others = [
        step_noise(2, [SampleId(5, 2, 3)], 7, SHAPE),
        step_noise(1, [SampleId(6, 2, 3)], 7, SHAPE),
        step_noise(1, [SampleId(5, 3, 3)], 7, SHAPE),
        step_noise(1, [SampleId(5, 2, 4)], 7, SHAPE),
        step_noise(1, [SampleId(5, 2, 3)], 8, SHAPE),
        initial_noise(1, [SampleId(5, 2, 3)], SHAPE, shared=False),
        initial_noise(1, [SampleId(5, 2, 3)], SHAPE, shared=True),
        # Keys are separated: (1, 52, 3) is not (15, 2, 3).
        step_noise(1, [SampleId(52, 3, 7)], 7, SHAPE),
    ]
    for one, other in itertools.combinations([base, *others], 2):
        assert not torch.equal(one, other)


def test_seeds_that_agree_in_their_low_32_bits_differ() -> None:
    one, other = (initial_noise(seed, IDS[:1], SHAPE, shared=True) for seed in (9, 9 + 2**32))
    assert not torch.equal(one, other)


def test_group_members_share_the_initial_draw_only_when_asked() -> None:
    shared = initial_noise(1, IDS, SHAPE, shared=True).reshape(3, 4, *SHAPE)
    assert (shared == shared[:, :1]).all()
    own = initial_noise(1, IDS, SHAPE, shared=False)
    for rows in (shared[:, 0], own):
        assert len({row.numpy().tobytes() for row in rows}) == len(rows)


def test_no_two_draws_of_a_step_coincide() -> None:
    """The draws of one 5B step: 32 prompts, 32 members, 29 noisy steps."""
    firsts = {
        keyed_generator(0, "step noise", 0, prompt, member, index).bit_generator.random_raw()
        for prompt in range(32)
        for member in range(32)
        for index in range(29)
    }
    assert len(firsts) == 32 * 32 * 29


def test_noise_is_standard_normal_and_uncorrelated() -> None:
    draws = torch.cat([step_noise(3, IDS, index, (1, 4, 16, 16)).flatten(1) for index in range(4)]).double()
    count = draws.numel()
    assert draws.dtype == torch.float64 and abs(draws.mean().item()) < 5 / count**0.5
    assert abs(draws.var().item() - 1) < 5 * (2 / count) ** 0.5
    correlation = np.corrcoef(draws.numpy()) - np.eye(len(draws))
    assert np.abs(correlation).max() < 5 / draws.shape[1] ** 0.5


def test_noise_is_float32_on_the_cpu_and_reproducible_across_versions() -> None:
    noise = initial_noise(42, [SampleId(0, 0, 0)], (4,), shared=True)
    assert noise.dtype == torch.float32 and noise.device.type == "cpu"
    assert noise[0].tolist() == pytest.approx([1.1882982, -0.4334584, 0.2232035, 0.3911838], abs=1e-6)


def test_eta_is_drawn_once_per_group_and_step() -> None:
    assert group_eta(1, IDS, 0.7, None).tolist() == pytest.approx([0.7] * 12)
    eta = group_eta(1, IDS, 0.7, (0.2, 0.9)).reshape(3, 4)
    assert (eta == eta[:, :1]).all() and len(set(eta[:, 0].tolist())) == 3
    assert ((eta >= 0.2) & (eta <= 0.9)).all()
    assert torch.equal(group_eta(1, IDS[5:6], 0.7, (0.2, 0.9)), eta[1, 1:2])
    next_step = group_eta(1, [SampleId(6, i.prompt, i.member) for i in IDS], 0.7, (0.2, 0.9))
    assert not torch.equal(next_step, eta.flatten())
    many = group_eta(1, [SampleId(s, 0, 0) for s in range(2000)], 0.7, (0.2, 0.9))
    assert many.mean().item() == pytest.approx(0.55, abs=0.02) and many.dtype == torch.float32
    assert (group_eta(1, IDS, 0.7, (0.0, 0.0)) == 0).all()
