"""What a part of the user's own must do is tried before anything heavy is loaded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_training.tests.targets.test_targets import target
from wan_trainer.algorithms.build import check_algorithm
from wan_trainer.config.specs import OwnRewardSpec
from wan_trainer.objectives.surrogate import clipped_surrogate, policy_loss
from wan_trainer.rewards.build import build_part
from wan_trainer.sampling.transitions import TRANSITIONS, kl, log_prob, rf_sde, transition_rule
from wan_trainer.training.lr_schedule import learning_rate_schedule
from wan_trainer.types import RunFailure, UserError

TRANSITION = """
import torch
from wan_trainer.sampling.transitions import Transition, rf_sde

class Rule:
    density = "gaussian"
    def __init__(self, fault=None, density="gaussian"):
        self.fault, self.density, self.calls = fault, density, 0
    def __call__(self, x_t, velocity, sigma, sigma_next, eta):
        self.calls += 1
        step = rf_sde(x_t, velocity, sigma, sigma_next, eta)
        if self.fault == "shape":
            return Transition(step.mean[:, :1], step.std)
        if self.fault == "dtype":
            return Transition(step.mean.double(), step.std.double())
        if self.fault == "pole":
            return Transition(step.mean * (1 / (1 - sigma)), step.std)
        if self.fault == "infinite":
            return Transition(step.mean / torch.tensor(1.0 - sigma), step.std)
        if self.fault == "detached":
            return Transition(step.mean.detach(), step.std)
        if self.fault == "state":
            return Transition(step.mean + self.calls, step.std)
        if self.fault == "negative":
            return Transition(step.mean, -step.std)
        if self.fault == "tuple":
            return step.mean
        return step

class NoDensity:
    def __call__(self, x_t, velocity, sigma, sigma_next, eta): ...
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fault": "shape"}, "has mean (2, 1, 4, 2, 2)"),
        ({"fault": "dtype"}, "computes in torch.float64"),
        ({"fault": "pole"}, "raised ZeroDivisionError"),
        ({"fault": "infinite"}, "not finite, or a negative std, from sigma 1.0 to 0.9"),
        ({"fault": "detached"}, "without a gradient in the velocity"),
        ({"fault": "state"}, "may hold no state"),
        ({"fault": "negative"}, "negative std"),
        ({"fault": "tuple"}, "raised AttributeError"),
        ({"density": "laplace"}, "needs density = 'gaussian' or 'surrogate'"),
    ],
)
def test_a_transition_that_breaks_its_interface_is_refused(module, arguments, words):
    path = f"{module(TRANSITION)}.Rule"
    with pytest.raises(UserError) as refused:
        transition_rule(target(path, **arguments))
    (line,) = refused.value.problems
    assert line.startswith(f"grpo_sde_formula: {path} ") and words in line


def test_a_transition_of_ones_own_takes_the_path_of_the_built_in_ones(module):
    name = module(TRANSITION)
    with pytest.raises(UserError, match="needs density"):
        transition_rule(target(f"{name}.NoDensity"))
    own, surrogate = target(f"{name}.Rule"), target(f"{name}.Rule", density="surrogate")
    assert transition_rule(own) is transition_rule(target(f"{name}.Rule")), "called once in a process"
    assert transition_rule(own) is not transition_rule(surrogate)
    assert all(transition_rule(kind) is rule for kind, rule in TRANSITIONS.items())
    x, v, after = torch.randn(3, 2, 2, 3, 2, 2, generator=torch.Generator().manual_seed(3))
    step = transition_rule(own)(x, v, 0.6, 0.5, torch.tensor([0.3, 0.4]))
    shifted = rf_sde(x, v + 0.1, 0.6, 0.5, torch.tensor([0.3, 0.4]))
    for kind, twin in ((own, "dancegrpo"), (surrogate, "flowcps")):
        assert torch.equal(log_prob(kind, after, step), log_prob(twin, after, step))
        assert torch.equal(kl(kind, step, shifted), kl(twin, step, shifted))


LOSS = """
import torch
class Loss:
    def __init__(self, fault=None):
        self.fault = fault
    def __call__(self, new, old, advantages, clip_range):
        terms = -advantages * torch.exp(new - old)
        if self.fault == "mean":
            return terms.mean()
        if self.fault == "detached":
            return terms.detach()
        if self.fault == "nan":
            return terms / (new - old)
        if self.fault == "double":
            return terms.double()
        return terms

def call_me_directly(new, old, advantages, clip_range):
    return -advantages * torch.exp(new - old)

def nothing():
    return None
"""


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("mean", "returned shape () for 3 samples: one term per sample"),
        ("detached", "without a gradient"),
        ("nan", "not finite where nothing has changed"),
        ("double", "returned torch.float64, not float32"),
    ],
)
def test_a_loss_that_breaks_its_interface_is_refused(module, path, words):
    with pytest.raises(UserError) as refused:
        policy_loss(target(f"{module(LOSS)}.Loss", fault=path))
    assert words in refused.value.problems[0] and "docs/extending.md" in refused.value.problems[0]


def test_a_target_is_called_for_the_part_it_is_not_the_part(module):
    name = module(LOSS)
    with pytest.raises(UserError, match="missing a required argument: 'new'"):
        policy_loss(target(f"{name}.call_me_directly"))
    with pytest.raises(UserError, match="returned NoneType without __call__"):
        policy_loss(target(f"{name}.nothing"))
    assert policy_loss(None) is clipped_surrogate
    terms = policy_loss(target(f"{name}.Loss"))(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, 2.0]), 0.1)
    assert terms.tolist() == [-1.0, -2.0]


SCHEDULE = """
def by_horizon():
    return lambda update, horizon: update / (horizon - 1)

def text():
    return lambda update, horizon: "1"

def late():
    return lambda update, horizon: 1.0 if update < 50 else float("nan")

def negative():
    return lambda update, horizon: 0.5 - update
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("by_horizon", "raised ZeroDivisionError"),
        ("text", "returned '1' for update 0 of 1"),
        ("negative", "returned -4.5 for update 5 of 10"),
    ],
)
def test_a_schedule_that_breaks_its_interface_is_refused(module, name, words):
    with pytest.raises(UserError) as refused:
        learning_rate_schedule(target(f"{module(SCHEDULE)}.{name}"), 0)
    assert words in refused.value.problems[0]


def test_a_schedule_that_fails_late_stops_the_run_before_the_update(module):
    schedule = learning_rate_schedule(target(f"{module(SCHEDULE)}.late"), 0)
    assert schedule(49, 100) == 1.0
    with pytest.raises(RunFailure, match="returned nan for update 50 of 100"):
        schedule(50, 100)


def test_an_algorithm_is_checked_as_far_as_a_missing_model_allows(module):
    name = module("class Mine:\n    def __init__(self, parts, strength): ...")
    check_algorithm("dancegrpo")
    check_algorithm(target(f"{name}.Mine", strength=1))
    with pytest.raises(UserError, match="missing a required argument: 'strength'"):
        check_algorithm(target(f"{name}.Mine"))


def test_a_reward_gets_the_tasks_and_must_have_both_methods(module):
    name = module(
        "class Mine:\n"
        "    def __init__(self, tasks, scale=1): self.tasks, self.scale = tasks, scale\n"
        "    def submit(self, videos, requests): ...\n"
        "    def close(self): ...\n"
        "def half(tasks):\n"
        "    return Mine.submit\n"
    )
    reward: Any = build_part(
        "grpo_reward_fn", OwnRewardSpec(target(f"{name}.Mine", scale=3), 1, 5.0), ["b", "a"]
    )
    assert reward.tasks == ("b", "a") and reward.scale == 3
    with pytest.raises(UserError, match="without submit and close, and needs submit, close"):
        build_part("grpo_reward_fn", OwnRewardSpec(target(f"{name}.half"), 1, 5.0), [])


def test_the_built_in_schedules_are_entries_of_the_lookup():
    cosine = learning_rate_schedule("cosine", 2)
    assert [cosine(0, 12), cosine(1, 12), cosine(7, 12)] == pytest.approx([0.5, 1.0, 0.5])
    assert math.isclose(learning_rate_schedule("constant", 2)(0, 12), 1.0)
