"""check-recipes: the shipped recipes hold, and a target that is not there is a line with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from wan_trainer.cli.check_recipes import recipes
from wan_trainer.cli.main import main
from wan_trainer.config import trainer_root

BASE = """\
model_path: ${SOME_MODEL_THAT_NOBODY_EXPORTED}
model_family: ti2v-5b
dataset_json: d.json
output_dir: ${SOME_PLACE:-out}
"""
TARGETS = """\
grpo_loss:  # a comment
  # another
  _target_: wan_trainer.objectives.surrogate.clipped_surogate  # the loss
grpo_reward_fn: [{_target_: parts_beside_it.Good}, {weight: 1, _target_: parts_beside_it.Bad}]  # two of them
lr_scheduler: {_target_: "no_such_module.Schedule", deep: [{_target_: json.dumps}, {_target_: plain}]} # in
reward_weights: {Good: 1, Bad: 1}
"""


def test_the_shipped_recipes_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-recipes"]) == 0
    said = capsys.readouterr()
    shipped = sorted((trainer_root() / "configs").glob("*.yaml"))
    assert [line.partition(": ")[0] for line in said.out.splitlines()] == [str(path) for path in shipped]
    assert len(shipped) >= 5 and said.err == ""


def test_every_target_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parts_beside_it.py").write_text("class Good: ...\nBad = 3\n")
    (tmp_path / "deeper").mkdir()
    bad, good = tmp_path / "bad.yaml", tmp_path / "deeper" / "good.yml"
    bad.write_text(BASE + TARGETS)
    good.write_text(BASE + "grpo_reward_fn: {_target_: json.dumps}\n")
    assert main(["check-recipes", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == f"{good}: loads, 1 target\n"
    expected = {
        7: ["surrogate", "has no clipped_surogate", "did you mean clipped_surrogate"],
        8: ["parts_beside_it.Bad is int, which cannot be called"],
        9: ["no module no_such_module for no_such_module.Schedule"],
    }
    lines = said.err.splitlines()
    for number, words in expected.items():
        (line,) = [
            line for line in lines if line.startswith(f"{bad}:{number}: _target_: ") and "plain" not in line
        ]
        assert all(word in line for word in words), line
    assert sum("_target_: plain is not an import path" in line for line in lines) == 1
    assert all("Good" not in line and "json" not in line for line in lines)
    assert not any("SOME_" in line for line in lines), "a variable is not what is checked"


def test_a_recipe_that_does_not_load_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(BASE + "grpo_group_sise: 4\n")
    (tmp_path / "b.yaml").write_text("a: [1\n")
    assert main(["check-recipes", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]) == 2
    said = capsys.readouterr().err
    assert "grpo_group_sise" in said and "line 5" in said and "b.yaml line 2" in said
    (tmp_path / "none").mkdir()
    assert main(["check-recipes", str(tmp_path / "none")]) == 2
    assert "holds no .yaml or .yml file" in capsys.readouterr().err
    assert recipes(["configs/quickstart.yaml"]) == [trainer_root() / "configs" / "quickstart.yaml"]
