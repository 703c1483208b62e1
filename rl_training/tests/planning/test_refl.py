"""The plan of a ReFL run: its calls against those that the algorithm makes, its ranks, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wan_trainer.config import load_config, resolve, topology_of
from wan_trainer.config.specs import RunSpec
from wan_trainer.planning.plan import make_plan
from wan_trainer.planning.refl import count_refl
from wan_trainer.planning.text import describe
from wan_trainer.types import UserError

RECIPE = "configs/quickstart_refl.yaml"
COLOUR = {"_target_": "wan_trainer.rewards.toy.Colour"}


def resolved(*flags: str, nproc: int = 2) -> tuple[RunSpec, Any]:
    config = load_config(RECIPE, ["--device", "cpu", *flags])
    return resolve(config, cuda_available=False), topology_of(config, 1, nproc)


# 8 steps, window 6..7 unless said otherwise, four prompts on two ranks: (steps with a gradient at most, on
# average, sampling, beside, backward, decodes) of each rank.
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (2, 2.0, 8, 0, 2, 1)),
        (["--refl_sample_batch_size", "1"], (2, 2.0, 16, 0, 4, 2)),
        (["--refl_kl_coeff", "1"], (2, 2.0, 8, 2, 2, 1)),
        (["--refl_cfg_scale", "4"], (2, 2.0, 16, 2, 2, 1)),
        (["--refl_cfg_scale", "4", "--refl_kl_coeff", "1"], (2, 2.0, 16, 4, 2, 1)),
        (["--refl_cfg_scale", "4", "--refl_cfg_grad", "both"], (2, 2.0, 8, 0, 2, 1)),
        (["--refl_algorithm", "drtune", "--refl_first_grad_step", "4"], (4, 4.0, 8, 0, 4, 1)),
        (["--refl_algorithm", "random_k", "--refl_first_grad_step", "5"], (3, 2.0, 8, 0, 3, 1)),
        (
            ["--refl_algorithm", "x0_jump", "--refl_first_grad_step", "3", "--refl_last_grad_step", "5"],
            (1, 1.0, 6, 0, 1, 1),
        ),
        (["--refl_algorithm", "last_step", "--refl_first_grad_step", "null"], (1, 1.0, 8, 0, 1, 1)),
    ],
)
def test_the_calls_of_a_rank(flags, expected):
    spec, topology = resolved(*flags)
    assert spec.refl is not None
    work = count_refl(spec, spec.refl, topology)
    found = (work.grad_steps, work.mean_grad_steps, work.sampling, work.beside, work.backward, work.decodes)
    assert found == expected


def test_a_separate_branch_of_guidance_does_not_double_the_rows_of_a_call():
    def peak(*flags: str) -> float:
        config = load_config(RECIPE, ["--device", "cpu", "--refl_cfg_scale", "4", *flags])
        return make_plan(config, 1, 2).memory.items["replay activations"]

    assert peak() < peak("--refl_cfg_grad", "both")


def test_roles_and_what_is_not_counted_are_said():
    roles = {
        "reward": {**COLOUR, "placement": {"ranks": 2}},
        "monitor": {**COLOUR, "placement": {"share_with": "actor"}},
    }
    flags = ["--device", "cpu", "--roles", json.dumps(roles), "--refl_kl_coeff", "0.5"]
    plan = make_plan(load_config(RECIPE, flags), 1, 6)
    text = describe(plan)
    for words in (
        "actor on ranks 0..3; reward wan_trainer.rewards.toy.Colour on ranks 4..5, each for 2 ranks",
        "monitor wan_trainer.rewards.toy.Colour on ranks 0..3; reference on ranks 0..3",
        "4 prompts a step, one video of each",
        "not counted: the reward's networks",
    ):
        assert words in text, text
    assert "scor" not in text.partition("note ")[0] and "on-policy" not in text
    assert plan.work.pending == 0 and "decode" not in plan.memory.phases
    assert plan.as_data()["topology"]["reward_ranks"] == 2


def test_a_window_of_the_other_expert_is_refused_where_the_model_is_there(tiny_a14b: Path):
    flags = ["--model_path", str(tiny_a14b), "--model_family", "i2v-a14b", "--train_experts", "low"]
    # Shift 5 and 8 steps: 0..2 are above the boundary of 0.9.
    good = ["--refl_first_grad_step", "3"]
    assert make_plan(load_config(RECIPE, [*flags, *good]), 1, 2).notes
    with pytest.raises(UserError) as caught:
        make_plan(load_config(RECIPE, [*flags, "--refl_first_grad_step", "2"]), 1, 2)
    (line,) = caught.value.problems
    assert line.startswith("refl_first_grad_step: the window 2..7") and "use a window within 3..7" in line


def test_prompts_that_do_not_spread_name_no_key_of_grpo():
    with pytest.raises(UserError) as caught:
        make_plan(load_config(RECIPE), 1, 3)
    (line,) = caught.value.problems
    assert line.startswith("batch_size: 4 prompts do not spread") and "grpo_" not in line
