"""Transitions, log-probability and KL against closed forms written independently in float64."""

import math

import pytest
import torch

from wan_trainer.sampling.schedule import sigmas
from wan_trainer.sampling.transitions import (
    TRANSITIONS,
    Transition,
    flow_cps,
    flow_grpo,
    kl,
    log_prob,
    rf_sde,
)

SHAPE = (3, 4, 3, 2, 5)
GRID = sigmas(30, 5.0)


def draw(*seeds: int) -> list[torch.Tensor]:
    return [
        torch.randn(SHAPE, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds
    ]


def closed_form(
    kind: str, x: float, v: float, s: float, s1: float, a: float, first: float
) -> tuple[float, float]:
    """Mean and std of one element, from the formulas of the papers and nothing else."""
    x0 = x - s * v
    if kind == "flowcps":
        std = s1 * math.sin(a * math.pi / 2)
        return (1 - s1) * x0 + math.sqrt(max(s1 * s1 - std * std, 0)) * (x + (1 - s) * v), std
    if kind == "flowgrpo":
        level = first if s == 1 else s
        a = a * math.sqrt(level / (1 - level))
    score = -(x - (1 - s) * x0) / s**2
    return x + (s1 - s) * v - 0.5 * a * a * score * (s1 - s), a * math.sqrt(s - s1)


@pytest.mark.parametrize("kind", ["flowcps", "dancegrpo", "flowgrpo"])
@pytest.mark.parametrize("index", [0, 1, 14, 28, 29])
@pytest.mark.parametrize("sigma_type", ["float", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_and_std_match_the_closed_form(kind, index, sigma_type, dtype) -> None:
    x, v = draw(1, 2)
    s, s1 = float(GRID[index]), float(GRID[index + 1])
    eta = torch.tensor([0.7, 0.3, 0.0])
    given = (
        (s, s1) if sigma_type == "float" else (torch.tensor(s, dtype=dtype), torch.tensor(s1, dtype=dtype))
    )
    step = TRANSITIONS[kind](x.to(dtype), v.to(dtype), *given, eta)
    assert step.mean.dtype == dtype and step.std.shape == (3, 1, 1, 1, 1)
    for n, a in enumerate(eta.double().tolist()):
        reference = [
            closed_form(kind, xi, vi, s, s1, a, float(GRID[1]))
            for xi, vi in zip(x[n].flatten().tolist(), v[n].flatten().tolist(), strict=True)
        ]
        mean = torch.tensor([m for m, _ in reference]).double()
        scale = mean.abs().max().item()
        tolerance = scale * (2e-6 if dtype == torch.float32 else 1e-12)
        assert (
            step.mean[n].flatten().double() - torch.tensor([m for m, _ in reference], dtype=torch.float64)
        ).abs().max() < max(tolerance, 1e-7 * (dtype == torch.float32))
        assert step.std[n].item() == pytest.approx(reference[0][1], rel=2e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("kind", "eta", "golden"),
    [
        ("flowgrpo", 0.7, (0.70, 0.22, 0.14)),
        ("dancegrpo", 0.3, (0.025, 0.042, 0.10)),
        ("flowcps", 0.7, (0.885, 0.725, 0.131)),
    ],
)
def test_golden_standard_deviations(kind, eta, golden) -> None:
    x = torch.zeros(1, 1, 1, 1, 1)
    for index, expected in zip((0, 15, 28), golden, strict=True):
        step = TRANSITIONS[kind](x, x, float(GRID[index]), float(GRID[index + 1]), torch.tensor([eta]))
        digits = len(str(expected).split(".")[1])
        assert step.std.item() == pytest.approx(expected, abs=0.51 * 10**-digits)


@pytest.mark.parametrize(
    ("kind", "eta", "excess"), [("flowgrpo", 0.7, 0.119), ("dancegrpo", 0.3, 0.124), ("flowcps", 0.7, 0.0)]
)
def test_marginal_noise_level_of_point_mass_data(kind, eta, excess) -> None:
    """With x0 fixed and the exact velocity (x - x0)/s a step is affine in the noise of x: take its gain."""
    x0 = torch.full((2, 1, 1, 1, 1), 0.37, dtype=torch.float64)
    noise = torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(2, 1, 1, 1, 1)
    deviations = []
    for s, s1 in zip(GRID[:-1].double().tolist(), GRID[1:].double().tolist(), strict=True):
        x = (1 - s) * x0 + noise
        step = TRANSITIONS[kind](x, (x - x0) / s, s, s1, torch.full((2,), eta, dtype=torch.float64))
        gain = (step.mean[1] - step.mean[0]).item()
        assert step.mean[0].item() == pytest.approx((1 - s1) * 0.37, abs=1e-9)
        deviations.append(math.sqrt((gain * s) ** 2 + step.std[0].item() ** 2) - s1)
    assert max(deviations) == deviations[-1] == pytest.approx(excess, abs=6e-4)
    assert min(deviations) > -1e-9


def test_flow_cps_at_eta_zero_is_the_euler_step_exactly_in_the_limit() -> None:
    x, v = draw(3, 4)
    for s, s1 in ((1.0, 0.9931507), (0.6, 0.55), (0.147, 0.0)):
        step = flow_cps(x, v, s, s1, torch.zeros(3))
        assert (step.mean - (x + (s1 - s) * v)).abs().max() < 1e-12
        assert (step.std == 0).all()


@pytest.mark.parametrize("transition", [flow_cps, rf_sde, flow_grpo])
def test_small_eta_tends_to_euler(transition) -> None:
    x, v = draw(3, 4)
    euler = x + (0.55 - 0.6) * v
    distance = [
        (transition(x, v, 0.6, 0.55, torch.full((3,), eta)).mean - euler).abs().max().item()
        for eta in (1e-1, 1e-2, 1e-3)
    ]
    assert distance[1] < distance[0] / 50 and distance[2] < distance[1] / 50 and distance[2] < 1e-5


@pytest.mark.parametrize("eta", [0.0, 1e-4, 0.5, 1.0])
def test_flow_cps_stays_finite_over_the_whole_range_of_eta(eta) -> None:
    x, v = (tensor.float() for tensor in draw(5, 6))
    for s, s1 in zip(GRID[:-1].tolist(), GRID[1:].tolist(), strict=True):
        step = flow_cps(x, v, s, s1, torch.full((3,), eta))
        assert torch.isfinite(step.mean).all() and (step.std <= s1).all() and (step.std >= 0).all()


@pytest.mark.parametrize("kind", ["dancegrpo", "flowgrpo"])
def test_gaussian_log_prob_is_the_mean_normal_density(kind) -> None:
    mean, x = draw(7, 8)
    std = torch.tensor([0.025, 0.3, 1.7], dtype=torch.float64).reshape(3, 1, 1, 1, 1)
    expected = torch.distributions.Normal(mean, std.expand_as(mean)).log_prob(x).mean(dim=(1, 2, 3, 4))
    assert log_prob(kind, x, Transition(mean, std)) == pytest.approx(expected, rel=1e-12)
    single = log_prob(kind, x.float(), Transition(mean.float(), std.float()))
    assert single.double() == pytest.approx(expected, rel=1e-5)


def test_flow_cps_log_prob_is_the_unscaled_surrogate() -> None:
    mean, x = draw(7, 8)
    value = log_prob("flowcps", x, Transition(mean, torch.full((3, 1, 1, 1, 1), 0.1)))
    assert value == pytest.approx(-((x - mean) ** 2).mean(dim=(1, 2, 3, 4)), rel=1e-12)


def test_pinned_elements_do_not_count_even_when_they_are_not_finite() -> None:
    mean, x = draw(9, 10)
    std = torch.full((3, 1, 1, 1, 1), 0.4, dtype=torch.float64)
    mask = torch.ones(1, 1, 3, 1, 1, dtype=torch.bool)
    mask[:, :, 0] = False
    x[:, :, 0] = float("nan")
    for kind in TRANSITIONS:
        expected = log_prob(kind, x[:, :, 1:], Transition(mean[:, :, 1:], std))
        assert log_prob(kind, x, Transition(mean, std), mask) == pytest.approx(expected, rel=1e-12)
        shifted = Transition(mean + 0.1, std)
        assert kl(kind, shifted, Transition(mean, std), mask) == pytest.approx(
            kl(kind, Transition(mean[:, :, 1:] + 0.1, std), Transition(mean[:, :, 1:], std)), rel=1e-12
        )


def test_kl_closed_forms_and_zero_to_itself() -> None:
    mean, other = draw(11, 12)
    std = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64).reshape(3, 1, 1, 1, 1)
    ours, reference = Transition(mean, std), Transition(other, std)
    normal = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std.expand_as(mean)),
        torch.distributions.Normal(other, std.expand_as(other)),
    ).mean(dim=(1, 2, 3, 4))
    assert kl("dancegrpo", ours, reference) == pytest.approx(normal, rel=1e-12)
    assert kl("flowgrpo", ours, reference) == pytest.approx(normal, rel=1e-12)
    surrogate = ((mean - other) ** 2).mean(dim=(1, 2, 3, 4))
    assert kl("flowcps", ours, reference) == pytest.approx(surrogate, rel=1e-12)
    assert all((kl(kind, ours, ours) == 0).all() for kind in TRANSITIONS)


@pytest.mark.parametrize("kind", ["flowcps", "dancegrpo", "flowgrpo"])
def test_a_step_without_noise_has_finite_log_prob_kl_and_gradient(kind) -> None:
    x, v = draw(13, 14)
    v.requires_grad_()
    step = TRANSITIONS[kind](x, v, 0.6, 0.55, torch.tensor([0.0, 0.5, 0.0]))
    value = log_prob(kind, step.mean.detach(), step)
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(v.grad).all()
    assert (v.grad[[0, 2]] == 0).all()
    assert torch.isfinite(kl(kind, step, Transition(step.mean + 1, step.std))).all()
