"""SIGKILL at a few fixed moments; benchmarks/kill_resume.py does the same at many drawn ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training import kills
from rl_training.tests.training.kills import Kill
from rl_training.tests.training.runs import tiny_recipe, write_recipe
from rl_training.tests.training.test_refl import recipe_of

pytestmark = pytest.mark.slow

# One rank, into the second write, when the first checkpoint is there; all, while the first rollout waits and
# the second is drawn.
KILLS = [
    Kill(kills.WRITE, 2, 0.005, victim=0, whole=False),
    Kill("sample", 4, 0.0, victim=1, whole=True),
]


def test_a_killed_refl_run_ends_bit_equal_to_one_that_was_not(tmp_path: Path, tiny_t2v: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", recipe_of(tmp_path, tiny_t2v))
    kills.complete_run(recipe, tmp_path / "whole", tmp_path / "scratch")
    # In a backward pass of the fifth batch, on one rank; the other ends with it.
    kill = Kill("replay", 5, 0.0, victim=1, whole=False)
    said = kills.kill_and_continue(recipe, tmp_path / "run", kill, tmp_path / "scratch")
    assert said is not None and said["phase"] == "replay"
    assert said["from"] == "checkpoint-4"
    assert kills.differences(tmp_path / "whole", tmp_path / "run") == [], said


def test_a_killed_run_ends_bit_equal_to_one_that_was_not(
    tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> None:
    values = tiny_recipe(tmp_path / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    whole = tmp_path / "whole"
    kills.complete_run(recipe, whole, tmp_path / "scratch")
    deaths = []
    for number, kill in enumerate(KILLS):
        run_dir = tmp_path / f"run-{number}"
        said = kills.kill_and_continue(recipe, run_dir, kill, tmp_path / "scratch")
        assert said is not None, f"{kill} came after the end"
        assert kills.differences(whole, run_dir) == [], said
        deaths.append(said)
    assert any(said["saving"] for said in deaths) and any(said["pending"] for said in deaths)
    assert {said["from"] for said in deaths} >= {None, "checkpoint-2"}
