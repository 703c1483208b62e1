"""The sampler against a straightforward loop, what it stores, and replay of what it stored."""

import math
from dataclasses import replace

import pytest
import torch

from wan_trainer.config.specs import SamplerSpec
from wan_trainer.sampling.noise import group_eta, initial_noise, step_noise
from wan_trainer.sampling.sampler import replay_log_prob, sample
from wan_trainer.sampling.schedule import replay_steps, sigmas
from wan_trainer.sampling.transitions import TRANSITIONS, log_prob
from wan_trainer.types import Condition, SampleId

SHAPE = (4, 3, 2, 2)
IDS = [SampleId(2, prompt, member) for prompt in range(2) for member in range(3)]
SPEC = SamplerSpec(
    kind="flowcps",
    eta=0.7,
    eta_range=None,
    num_steps=8,
    flow_shift=5.0,
    cfg_scale=1.0,
    share_group_init_noise=True,
    replay_ratio=0.6,
    trajectory_dtype="float32",
    seed=4,
)


def velocity(x_t: torch.Tensor, sigma: float, condition: Condition) -> torch.Tensor:
    """A smooth field that depends on every argument and mixes frames."""
    assert x_t.dtype == torch.float32 and isinstance(sigma, float)
    text = condition.text.mean(dim=(1, 2)).reshape(-1, 1, 1, 1, 1)
    return torch.tanh(x_t + 0.3 * x_t.mean(2, keepdim=True)) * (1 + sigma) + text


def condition(pinned: bool = False, n: int = len(IDS)) -> Condition:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(n, SHAPE[0], 1, *SHAPE[2:], generator=generator) if pinned else None
    return Condition(text=torch.randn(n, 5, 3, generator=generator), first_frame_latent=first)


def run(spec: SamplerSpec, keep: list[int], pinned: bool = False):
    grid = sigmas(spec.num_steps, 5.0)
    with torch.no_grad():
        return sample(velocity, condition(pinned), IDS, spec, grid, keep, SHAPE, "cpu")


@pytest.mark.parametrize("kind", list(TRANSITIONS))
@pytest.mark.parametrize("pinned", [False, True])
def test_sampler_equals_a_straightforward_loop(kind, pinned) -> None:
    spec, given = replace(SPEC, kind=kind), condition(pinned)
    grid = sigmas(8, 5.0).tolist()
    x = initial_noise(4, IDS, SHAPE, shared=True)
    eta = group_eta(4, IDS, 0.7, None)
    path, old = {}, {}
    for i in range(8):
        if pinned:
            x[:, :, :1] = given.first_frame_latent
        path[i] = x.clone()
        step = TRANSITIONS[kind](x, velocity(x, grid[i], given), grid[i], grid[i + 1], eta)
        x = step.mean.clone() if i == 7 else step.mean + step.std * step_noise(4, IDS, i, SHAPE)
        if pinned:
            x[:, :, :1] = given.first_frame_latent
        mask = torch.tensor([not pinned, True, True]).reshape(1, 1, 3, 1, 1)
        old[i] = log_prob(kind, x, step, mask)
    trajectory = run(spec, [1, 2, 6], pinned)
    assert torch.equal(trajectory.x0, x) and trajectory.x0.dtype == torch.float32
    assert sorted(trajectory.latents) == [1, 2, 3, 6, 7]
    free = slice(1 if pinned else 0, None)
    for index, latent in trajectory.latents.items():
        assert torch.equal(latent[:, :, free], path[index][:, :, free])
    assert [step.index for step in trajectory.steps] == [1, 2, 6]
    for step in trajectory.steps:
        assert (step.sigma, step.sigma_next) == (grid[step.index], grid[step.index + 1])
        assert step.old_log_prob == pytest.approx(old[step.index], abs=2e-6)


@pytest.mark.parametrize("kind", list(TRANSITIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("pinned", [False, True])
def test_replay_gives_the_stored_log_prob_bit_for_bit(kind, dtype, pinned) -> None:
    spec = replace(SPEC, kind=kind, trajectory_dtype=dtype, eta=0.3)
    trajectory = run(spec, list(range(7)), pinned)
    assert all(latent.dtype == getattr(torch, dtype) for latent in trajectory.latents.values())
    for step in trajectory.steps:
        new = replay_log_prob(velocity, condition(pinned), trajectory, step, kind)
        assert torch.equal(new, step.old_log_prob)


def test_a_perturbed_sigma_changes_the_replayed_log_prob() -> None:
    trajectory = run(SPEC, [3])
    moved = replace(trajectory.steps[0], sigma=trajectory.steps[0].sigma + 1e-3)
    new = replay_log_prob(velocity, condition(), trajectory, moved, "flowcps")
    assert (new - moved.old_log_prob).abs().min() > 1e-5


def test_the_pinned_frame_is_exact_in_a_narrow_trajectory_dtype() -> None:
    seen: list[torch.Tensor] = []

    def watch(x_t: torch.Tensor, sigma: float, given: Condition) -> torch.Tensor:
        seen.append(x_t[:, :, :1].clone())
        return velocity(x_t, sigma, given)

    given = condition(pinned=True)
    spec = replace(SPEC, trajectory_dtype="bfloat16")
    trajectory = sample(watch, given, IDS, spec, sigmas(8, 5.0), [2], SHAPE, "cpu")
    replay_log_prob(watch, given, trajectory, trajectory.steps[0], "flowcps")
    assert len(seen) == 9
    assert all(torch.equal(frame, given.first_frame_latent) for frame in seen)
    assert torch.equal(trajectory.x0[:, :, :1], given.first_frame_latent)


def test_trajectory_does_not_depend_on_which_steps_are_kept() -> None:
    spec = replace(SPEC, trajectory_dtype="bfloat16")
    few, all_ = run(spec, [5]), run(spec, list(range(7)))
    assert torch.equal(few.x0, all_.x0)
    assert torch.equal(few.latents[5], all_.latents[5]) and torch.equal(few.latents[6], all_.latents[6])


def test_rollout_does_not_depend_on_the_chunk() -> None:
    whole = run(SPEC, [0, 4])
    grid = sigmas(8, 5.0)
    for start in range(0, 6, 2):
        rows = list(range(start, start + 2))
        part = sample(
            velocity, condition().select(rows), IDS[start : start + 2], SPEC, grid, [0, 4], SHAPE, "cpu"
        )
        assert part.x0 == pytest.approx(whole.x0[rows], abs=1e-6)
        assert part.steps[1].old_log_prob == pytest.approx(whole.steps[1].old_log_prob[rows], abs=1e-6)


def test_each_needed_latent_is_stored_once() -> None:
    spec = replace(SPEC, num_steps=30)
    counts = []
    for step in range(40):
        keep = replay_steps(30, 0.6, 0, step)
        needed = {index + offset for index in keep for offset in (0, 1)}
        trajectory = run(spec, keep)
        assert set(trajectory.latents) == needed
        storages = {latent.untyped_storage().data_ptr() for latent in trajectory.latents.values()}
        assert len(storages) == len(needed)
        held = sum(latent.untyped_storage().nbytes() for latent in trajectory.latents.values())
        assert held == len(needed) * len(IDS) * math.prod(SHAPE) * 4, "no latent keeps a larger buffer alive"
        counts.append(len(needed))
    assert min(counts) >= 22 and max(counts) <= 29 and 23.5 < sum(counts) / len(counts) < 26


@pytest.mark.parametrize("kind", ["dancegrpo", "flowgrpo"])
def test_gaussian_kinds_at_eta_zero_follow_euler_and_stay_finite(kind) -> None:
    euler = run(replace(SPEC, eta=0.0), [1])
    trajectory = run(replace(SPEC, kind=kind, eta=0.0), [1])
    assert trajectory.x0 == pytest.approx(euler.x0, abs=1e-5)
    assert (trajectory.steps[0].old_log_prob == 0).all() and (euler.steps[0].old_log_prob == 0).all()


def test_group_wise_eta_is_stored_and_used_again() -> None:
    spec = replace(SPEC, eta_range=(0.1, 0.9))
    trajectory = run(spec, [0, 3])
    assert torch.equal(trajectory.eta, group_eta(4, IDS, 0.7, (0.1, 0.9)))
    assert trajectory.eta[0] == trajectory.eta[2] != trajectory.eta[3]
    new = replay_log_prob(velocity, condition(), trajectory, trajectory.steps[1], "flowcps")
    assert torch.equal(new, trajectory.steps[1].old_log_prob)
    wrong = replace(trajectory, eta=torch.full_like(trajectory.eta, 0.7))
    assert not torch.equal(
        replay_log_prob(velocity, condition(), wrong, wrong.steps[1], "flowcps"), wrong.steps[1].old_log_prob
    )


def test_the_last_step_is_never_replayed() -> None:
    with pytest.raises(AssertionError, match="never replayed"):
        run(SPEC, [7])
