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

# Two saves, with a delayed rollout between them.
BATCHES = 4


def test_a_killed_refl_run_ends_bit_equal_to_one_that_was_not(tmp_path: Path, tiny_t2v: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", recipe_of(tmp_path, tiny_t2v))
    whole, run_dir, scratch = (tmp_path / name for name in ("whole", "run", "scratch"))
    kills.complete_run(recipe, whole, scratch, BATCHES)
    # In a backward pass of the fourth batch, on one rank; the other ends with it.
    kill = Kill("replay", 4, 0.0, victim=1, whole=False)
    said = kills.kill_run(recipe, run_dir, kill, scratch, BATCHES)
    assert said is not None and said["phase"] == "replay"
    assert said["from"] == "checkpoint-2"
    kills.complete_run(recipe, run_dir, scratch, BATCHES)
    assert kills.differences(whole, run_dir, BATCHES) == [], said


def test_a_killed_run_ends_bit_equal_to_one_that_was_not(
    tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> None:
    values = tiny_recipe(tmp_path / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    whole, run_dir, scratch = (tmp_path / name for name in ("whole", "run", "scratch"))
    kills.complete_run(recipe, whole, scratch, BATCHES)
    # All ranks, while the first rollout waits and the second is drawn: nothing is saved yet.
    waiting = Kill("sample", 4, 0.0, victim=1, whole=True)
    first = kills.kill_run(recipe, run_dir, waiting, scratch, BATCHES)
    assert first is not None and first["pending"] and first["from"] is None
    # One rank, into the second write, when the first checkpoint is there.
    writing = Kill(kills.WRITE, 2, 0.005, victim=0, whole=False)
    second = kills.kill_run(recipe, run_dir, writing, scratch, BATCHES)
    assert second is not None and second["saving"] and second["from"] == "checkpoint-2"
    kills.complete_run(recipe, run_dir, scratch, BATCHES)
    assert kills.differences(whole, run_dir, BATCHES) == [], (first, second)
