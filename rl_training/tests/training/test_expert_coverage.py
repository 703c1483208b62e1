"""A trained expert that no replayed step reaches is said, at the start and at the end of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_training.tests.models.families import model_spec
from wan_trainer.config.specs import Experts
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.sampling.schedule import sigmas
from wan_trainer.training.expert_coverage import (
    ExpertCoverage,
    check_reach,
    learning_experts,
    unreachable_experts,
)
from wan_trainer.types import UserError


def policy_of(path: Path, trained: Experts) -> WanPolicy:
    spec = model_spec(path, "i2v-a14b", train_experts=trained)
    return build_policy(load_wan(spec, "cpu", materialize=False), spec, cfg_scale=1.0, seed=0)


def test_an_expert_below_every_replayable_sigma_is_found_before_anything_is_loaded(tiny_a14b: Path) -> None:
    # Boundary 0.9. Three steps at shift 5 replay sigmas 1 and 0.91, four also 0.83.
    for trained, missing in (("both", ["transformer_2"]), ("high", []), ("low", ["transformer_2"])):
        policy = policy_of(tiny_a14b, trained)
        assert unreachable_experts(policy, sigmas(3, 5.0)) == missing
        assert unreachable_experts(policy, sigmas(4, 5.0)) == []
        check_reach(policy, sigmas(4, 5.0))
        if trained != "low":
            check_reach(policy, sigmas(3, 5.0))
            continue
        assert learning_experts(policy) == ["transformer_2"]
        with pytest.raises(
            UserError, match=r"grpo_num_sampling_steps: 3 steps .* 0.909 to 1.000, .*low-noise"
        ):
            check_reach(policy, sigmas(3, 5.0))


def test_an_epoch_without_a_step_of_a_trained_expert_is_warned_about_once() -> None:
    coverage = ExpertCoverage(["transformer", "transformer_2"])
    assert coverage.add(0, {"transformer": 3}) == []
    assert coverage.add(0, {"transformer": 2, "transformer_2": 1}) == []
    assert coverage.add(1, {"transformer": 3}) == [], "the first epoch had one"
    assert coverage.add(1, {"transformer": 4}) == []
    (line,) = coverage.add(2, {"transformer_2": 3})
    assert "none of the 7 steps replayed in epoch 1" in line and "transformer_2 (low-noise)" in line
    (line,) = coverage.add(3, {"transformer": 1})
    assert "epoch 2" in line and "transformer (high-noise)" in line
    (line,) = coverage.close()
    assert "epoch 3" in line and "transformer_2 (low-noise)" in line


def test_the_last_epoch_is_judged_at_the_end() -> None:
    assert ExpertCoverage(["transformer"]).close() == []
    coverage = ExpertCoverage(["transformer_2"])
    assert coverage.add(0, {"transformer": 3}) == []
    (line,) = coverage.close()
    assert "none of the 3 steps" in line
