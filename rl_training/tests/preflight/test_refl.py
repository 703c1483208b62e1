"""A ReFL run that cannot start: one line each, before any weights load, in preflight and in the trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from wan_trainer.config import load_config, load_with_sources
from wan_trainer.preflight.checks import run_checks
from wan_trainer.preflight.network import free_port
from wan_trainer.training.run import plan_start
from wan_trainer.types import UserError

# A reward of the user's own, beside the recipe, that says what is missing.
OWN = """
from pathlib import Path

from wan_trainer.types import UserError


class Look:
    def __init__(self, context, *, model_path):
        raise AssertionError("built before training")

    @staticmethod
    def check_files(*, model_path):
        if not Path(model_path).is_file():
            raise UserError(f"model_path: {model_path} is not there; put the weights there")
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_a14b: Path, monkeypatch: pytest.MonkeyPatch):
    """recipe(**changes) is a config whose low-noise expert is trained; its reward has its weights."""
    for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "look_of_test.py").write_text(OWN)
    (tmp_path / "weights").write_text("w")
    (tmp_path / "image.png").write_text("anything")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a ball", "image": "image.png"}\n')

    def write(**changes: Any) -> Path:
        values: dict[str, Any] = {
            "trainer": "refl",
            "device": "cpu",
            "model_path": str(tiny_a14b),
            "dataset_json": str(tmp_path / "prompts.jsonl"),
            "output_dir": str(tmp_path / "run"),
            "num_frames": 5,
            "height": 32,
            "width": 32,
            "num_workers": 0,
            "refl_num_sampling_steps": 8,
            "flow_shift": 5.0,
            "refl_first_grad_step": 3,
            "train_experts": "low",
            "roles": reward("look_of_test.Look"),
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**values, **changes}))
        return path

    def reward(target: str, weights: str = "weights") -> dict[str, Any]:
        return {"reward": {"_target_": target, "config": {"model_path": str(tmp_path / weights)}}}

    write.reward = reward  # type: ignore[attr-defined]
    return write


def problems(config: Path) -> list[str]:
    """The errors of preflight; the trainer has those that concern the recipe too."""
    found = run_checks(load_config(config), 1, 1, 0, os.environ)
    errors = [finding.message for finding in found if finding.kind == "error"]
    try:
        plan_start(load_with_sources(config))
    except UserError as error:
        assert list(error.problems) == errors
    else:
        assert errors == []
    return errors


def test_a_good_refl_config_passes(recipe):
    assert problems(recipe()) == []


@pytest.mark.parametrize(
    ("target", "weights", "fragments"),
    [
        ("look_of_test.Looks", "weights", ["roles.reward: look_of_test", "did you mean Look?"]),
        ("no_such_module.Look", "weights", ["roles.reward: no module no_such_module"]),
        ("look_of_test.Look", "nowhere", ["model_path:", "nowhere is not there"]),
        ("wan_trainer.rewards.videoalign.VideoAlign", "nowhere", ["nowhere"]),
        ("wan_trainer.rewards.face.Face", "nowhere", ["nowhere"]),
        ("wan_trainer.rewards.toy.Colour", "weights", ["roles.reward:", "unexpected keyword argument"]),
    ],
)
def test_a_reward_that_cannot_be_is_one_line(recipe, target, weights, fragments):
    (line,) = problems(recipe(roles=recipe.reward(target, weights)))
    assert all(fragment in line for fragment in fragments), line


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"refl_first_grad_step": 2}, ["the window 2..7", "step 2 is the high-noise", "within 3..7"]),
        (
            {"train_experts": "high", "refl_algorithm": "last_step", "refl_first_grad_step": None},
            ["the window 7..7", "step 7 is the low-noise", "within 0..2"],
        ),
        (
            {"train_experts": "both", "lora_rank": 2, "lora_module_prefix": "low_noise"}
            | {"refl_first_grad_step": 0},
            ["the window 0..7", "low-noise is trained"],
        ),
    ],
)
def test_a_window_outside_the_trained_expert_is_one_line(recipe, changes, fragments):
    (line,) = problems(recipe(**changes))
    assert line.startswith("refl_first_grad_step: ") and all(part in line for part in fragments), line


def test_a_model_that_cannot_be_read_is_not_asked_for_its_window(recipe, tmp_path):
    lines = problems(recipe(model_path=str(tmp_path / "no_model"), model_family="i2v-a14b"))
    assert len(lines) == 1 and lines[0].startswith("model_path: ")
