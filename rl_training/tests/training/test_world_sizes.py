"""A run that goes on with other numbers of ranks and layouts trains what an uninterrupted one trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rl_training.tests.distributed.layouts import ById
from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import rows, run, tiny_recipe, write_recipe
from wan_trainer.recording.manifest import read_manifest
from wan_trainer.training import session
from wan_trainer.training.stop import AgreedStop
from wan_trainer.types import EXIT_DONE, EXIT_STOPPED

pytestmark = pytest.mark.slow

BATCHES = 6


class _StopAfter(AgreedStop):
    """Asked to stop once `batches` are trained: by a signal that comes at the same moment every time."""

    batches = 0

    def requested(self) -> bool:
        # The first question comes before the first batch.
        self.batches -= 1
        return self.batches == -1


def _start(recipe: str, ranks_per_node: int, batches: int, overrides: list[str]) -> Any:
    """One start that is to train `batches` batches."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    _StopAfter.batches = batches
    session.AgreedStop = _StopAfter  # type: ignore[misc]
    return run(recipe, overrides, ById())


def test_four_two_and_four_ranks_train_what_one_rank_trains(
    tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> None:
    values = tiny_recipe(tmp_path / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit) | {
        # One rollout a call everywhere: another batch size is other kernels.
        "grpo_sample_batch_size": 1,
        "grpo_train_sample_batch_size": 1,
        # Half of the batches are replayed one update late.
        "max_off_policy_steps": 1,
        "num_epochs": 2,
        "max_steps": BATCHES,
        "save_steps": 2,
        "learning_rate": 1.0e-4,
        "lr_scheduler": "cosine",
        "ema_decay": 0.5,
        "keep_checkpoints": 0,
    }
    recipe = str(write_recipe(tmp_path / "recipe.yaml", values))
    out = str(tmp_path / "alone")
    assert run_ranks(1, _start, recipe, 1, BATCHES, ["--output_dir", out]) == [EXIT_DONE]
    # The dataset's eight samples are four batches: the second stop is at an epoch's end.
    for ranks, ranks_per_node, batches, layout, status in (
        (4, 4, 2, [], EXIT_STOPPED),
        (2, 2, 2, ["--tensor_parallel_size", "2"], EXIT_STOPPED),
        (4, 2, 2, ["--hsdp"], EXIT_DONE),
    ):
        assert run_ranks(ranks, _start, recipe, ranks_per_node, batches, layout) == [status] * ranks

    (alone, changing) = (tmp_path / "alone", tmp_path / "run")
    trained = [
        sorted(
            (row["step"], row["sample_id"], row["prompt"], row["member"])
            for row in rows(path, "rewards.jsonl")
        )
        for path in (alone, changing)
    ]
    assert len(trained[0]) == BATCHES * 4 and trained[0] == trained[1]
    expected, found = (rows(path, "metrics.jsonl") for path in (alone, changing))
    exact = (
        "batch",
        "step",
        "epoch",
        "policy_version",
        "policy_age",
        "lr",
        "replayed_per_expert",
        "reward_mean",
    )
    assert [[row[key] for key in exact] for row in found] == [[row[key] for key in exact] for row in expected]
    assert [row["policy_age"] for row in found] == [0, 1] * (BATCHES // 2)
    for row, other in zip(found, expected, strict=True):
        for key in ("policy_loss", "approx_kl", "ratio_mean"):
            assert row[key] == pytest.approx(other[key], abs=1e-5), (row["batch"], key)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3), row["batch"]
    worlds = [read_manifest(changing / f"checkpoint-{step}").world for step in (2, 4, 6)]
    assert worlds == [4, 2, 4]
