"""The roles of a ReFL recipe: every rule is one line before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wan_trainer.config import load_with_sources, resolve, topology_of
from wan_trainer.config.contract import contract_values
from wan_trainer.types import UserError

LOOK = {"_target_": "mine.rewards.Look"}
SHARED = {**LOOK, "placement": {"share_with": "actor"}}


def refused(load, roles: dict[str, Any], **values: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(reward="refl", roles=roles, **values)
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize(
    ("roles", "fragments"),
    [
        ({}, ["has no reward", "write reward:"]),
        ({"reward": LOOK, "critic": LOOK}, ["a role critic", "actor, reward, monitor, reference"]),
        ({"rewards": LOOK}, ["a role rewards", "did you mean reward?"]),
        ({"reward": "mine.rewards.Look"}, ["is not a mapping"]),
        ({"reward": {}}, ["_target_"]),
        ({"reward": {**LOOK, "weight": 2}}, ["reward.weight", "use _target_, config, placement"]),
        ({"reward": {**LOOK, "config": [1]}}, ["reward.config", "`argument: value` lines"]),
        ({"reward": LOOK, "reference": LOOK}, ["reference._target_", "use placement"]),
        ({"reward": {**LOOK, "placement": {"nodes": 2}}}, ["reward.placement", "{ranks: N}"]),
        ({"reward": {**LOOK, "placement": {"ranks": 0}}}, ["ranks: 0", "whole number from 1"]),
        (
            {"reward": {**LOOK, "placement": {"ranks": 1, "share_with": "actor"}}},
            ["reward.placement", "{share_with: actor}, or {ranks: N}"],
        ),
        (
            {"reward": SHARED, "monitor": {**LOOK, "placement": {"ranks": 2}}},
            ["gives monitor ranks of its own", "use share_with"],
        ),
        ({"reward": {**LOOK, "placement": {"share_with": "monitor"}}}, ["no role here", "use one of actor"]),
        (
            {
                "reward": {**LOOK, "placement": {"share_with": "monitor"}},
                "monitor": {**LOOK, "placement": {"share_with": "reward"}},
            },
            [
                "in a circle: reward shares with monitor shares with reward",
                "let one of them share with actor",
            ],
        ),
        (
            {"reward": {**LOOK, "placement": {"share_with": "reward"}}},
            ["in a circle: reward shares with reward"],
        ),
        (
            {"reward": SHARED, "reference": {"placement": {"share_with": "reward"}}},
            ["places reference with reward", "use share_with: actor"],
        ),
        ({"reward": SHARED, "reference": {}}, ["has a reference", "refl_kl_coeff is 0"]),
    ],
)
def test_roles_that_cannot_be_are_one_line(load, roles, fragments):
    line = refused(load, roles)
    assert line.startswith("roles ") and all(fragment in line for fragment in fragments), line


def test_a_run_without_roles_is_told_to_name_its_reward(load):
    with pytest.raises(UserError) as caught:
        load(reward="refl", roles=None)
    (line,) = caught.value.problems
    assert line.startswith("roles ") and "{_target_: my_module.MyReward}" in line


def ranks(load, count: int, nproc: int, **values: Any):
    roles = {"reward": {**LOOK, "placement": {"ranks": count}}}
    return topology_of(load(reward="refl", roles=roles, **values).config, 1, nproc)


def test_ranks_of_the_rewards_own_come_on_top_of_those_that_train(load):
    topology = ranks(load, 2, 8, batch_size=6)
    assert (topology.world, topology.dp, topology.reward_ranks, topology.rollouts_per_rank) == (6, 6, 2, 1)
    shared = topology_of(load(reward="refl", roles={"reward": SHARED}, batch_size=8).config, 1, 8)
    assert (shared.world, shared.reward_ranks) == (8, 0)


@pytest.mark.parametrize(
    ("count", "nproc", "values", "fragments"),
    [
        (8, 8, {}, ["ranks: 8", "leave none to the actor", "use 4"]),
        (3, 8, {}, ["cannot serve the 5 other ranks alike", "use 2 or 4"]),
        (1, 4, {"tensor_parallel_size": 2}, ["which tensor_parallel_size 2 does not divide", "use 2"]),
        (2, 8, {"batch_size": 8}, ["8 prompts do not spread evenly over 6", "--batch_size 6 or 12"]),
    ],
)
def test_ranks_that_do_not_divide_are_one_line(load, count, nproc, values, fragments):
    with pytest.raises(UserError) as caught:
        ranks(load, count, nproc, **values)
    (line,) = caught.value.problems
    assert all(fragment in line for fragment in fragments), line
    assert "grpo_" not in line


def test_nodes_of_unequal_size_are_no_hybrid_sharding(load):
    line = refused(load, {"reward": {**LOOK, "placement": {"ranks": 2}}}, hsdp=True)
    assert line.startswith("hsdp ") and "use --no-hsdp" in line


def test_a_resumed_run_may_place_roles_elsewhere_but_not_change_them(load):
    def contract(roles: dict[str, Any]) -> Any:
        return contract_values(load(reward="refl", roles=roles).config, 1)

    home, own = {"reward": SHARED}, {"reward": {**LOOK, "placement": {"ranks": 2}}}
    other = {"reward": {**SHARED, "_target_": "mine.rewards.Other"}}
    assert contract(home) == contract(own)
    assert contract(home) != contract(other)


def test_actor_holds_flat_keys_and_may_not_repeat_them(load):
    base = "roles:\n  actor:\n    learning_rate: 1.0e-3\n  reward: {_target_: mine.rewards.Look}\n"
    loaded = load(reward="refl_flat", text=base)
    assert loaded.config.learning_rate == 1e-3
    assert loaded.sources["learning_rate"] == "yaml"
    spec = resolve(loaded.config, cuda_available=False)
    assert spec.refl is not None and spec.refl.roles.reward.path == "mine.rewards.Look"
    with pytest.raises(UserError) as twice:
        load(reward="refl_flat", text=base, learning_rate=1e-4)
    assert "learning_rate" in twice.value.problems[0] and "is also set on line" in twice.value.problems[0]
    with pytest.raises(UserError) as unknown:
        load(reward="refl_flat", text=base.replace("learning_rate", "learning_rat"))
    assert "did you mean learning_rate?" in unknown.value.problems[0]


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("x", "x is not a mapping of roles; write for example {reward: {_target_: my_module.MyReward}}"),
        ("[1]", "[1] is not a mapping of roles; "),
        ("true", "true is not a mapping of roles; "),
        ("{1: {}, reward: {_target_: a.b}}", "1 is not a mapping of roles; "),
        ("{reward: {_target_: a.b, config: {1: 2}}}", "1 is not a mapping of roles; "),
        ("{actor: x, reward: {_target_: a.b}}", "has an actor that is not a mapping of keys in a file; "),
        ("{actor: {seed: 1}, actor: {seed: 2}, reward: {_target_: a.b}}", "names actor twice; "),
        ("{reward: {_target_: a.b, placement: {ranks: null}}}", "has reward.placement.ranks: None; "),
        ("{reward: {_target_: a.b, config: {_target_: c.d}}}", "has _target_ in reward.config; "),
    ],
)
def test_roles_of_another_form_are_one_line(roles: str, said: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"trainer: refl\nmodel_path: m\ndataset_json: d\noutput_dir: o\nroles: {roles}\n")
    with pytest.raises(UserError) as caught:
        load_with_sources(recipe)
    lines = [line for line in caught.value.problems if line.startswith("roles")]
    assert any(line.partition(": ")[2].startswith(said) for line in lines), lines
    assert all("\n" not in line for line in lines)
