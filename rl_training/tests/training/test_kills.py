"""SIGKILL at a few fixed moments; benchmarks/kill_resume.py does the same at many drawn ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training import kills
from rl_training.tests.training.kills import Kill
from rl_training.tests.training.runs import tiny_recipe, write_recipe
from rl_training.tests.training.test_refl import recipe_of

pytestmark = pytest.mark.slow

# Saves behind batches 2, 4 and 5: the first two are written while training goes on.
BATCHES = 5
# All ranks, while the first rollout waits and the second is drawn: nothing is saved yet.
WAITING = Kill("sample", 4, 0.0, victim=1, whole=True)
# One rank of the continued run, into the second write, when the first checkpoint is there.
WRITING = Kill(kills.WRITE, 2, 0.005, victim=0, whole=False)
# One rank in a backward pass of the fourth batch; the other ends with it.
REPLAYING = Kill("replay", 4, 0.0, victim=1, whole=False)


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_ti2v: Path,
    tiny_t2v: Path,
    tiny_dataset: Path,
    tiny_evalkit: TinyEvalkit,
) -> tuple[Path, dict[str, dict[str, Any] | None]]:
    """Where a whole and a killed run of each algorithm are, and what each victim was doing."""
    out = tmp_path_factory.mktemp("kills")
    scratch = out / "scratch"
    grpo = write_recipe(out / "grpo.yaml", tiny_recipe(out / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit))
    refl = write_recipe(out / "refl.yaml", recipe_of(out, tiny_t2v))
    kills.complete_runs([(grpo, out / "grpo-whole"), (refl, out / "refl-whole")], scratch, BATCHES)
    said = {
        name: kills.kill_run(recipe, run_dir, kill, scratch, BATCHES)
        for name, recipe, run_dir, kill in (
            ("waiting", grpo, out / "grpo-killed", WAITING),
            ("writing", grpo, out / "grpo-killed", WRITING),
            ("replaying", refl, out / "refl-killed", REPLAYING),
        )
    }
    kills.complete_runs([(grpo, out / "grpo-killed"), (refl, out / "refl-killed")], scratch, BATCHES)
    return out, said


def test_a_killed_refl_run_ends_bit_equal_to_one_that_was_not(
    killed: tuple[Path, dict[str, dict[str, Any] | None]],
) -> None:
    out, said = killed
    death = said["replaying"]
    assert death is not None and death["phase"] == "replay" and death["from"] == "checkpoint-2"
    assert kills.differences(out / "refl-whole", out / "refl-killed", BATCHES) == [], said


def test_a_killed_run_ends_bit_equal_to_one_that_was_not(
    killed: tuple[Path, dict[str, dict[str, Any] | None]],
) -> None:
    out, said = killed
    first, second = said["waiting"], said["writing"]
    assert first is not None and first["pending"] and first["from"] is None
    assert second is not None and second["saving"] and second["from"] == "checkpoint-2"
    assert kills.differences(out / "grpo-whole", out / "grpo-killed", BATCHES) == [], said
