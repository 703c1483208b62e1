"""Real runs with a divergence term and averages, interrupted and not: the starting policy stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import MeanColour, rows, run, tiny_recipe, write_recipe

EXACT = ("kl_loss", "policy_loss", "reward_mean", "grad_norm", "ratio_max_dev", "replayed_samples")


def _three_starts(recipe: str, out: Path) -> list[Any]:
    """A run of three batches; another of two, which a second start makes three."""
    common = ["--lr_scheduler", "constant"]
    return [
        run(recipe, [*common, "--max_steps", steps, "--output_dir", str(out / name)], MeanColour())
        for name, steps in (("whole", "2"), ("parts", "1"), ("parts", "2"))
    ]


def _tensors(checkpoint: Path, section: str) -> dict[str, torch.Tensor]:
    whole = checkpoint.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint / "state", whole)
    return torch.load(whole)[section]


def test_full_fine_tuning_keeps_its_starting_policy_over_a_resume(
    tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> None:
    values = tiny_recipe(tmp_path / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    recipe = write_recipe(tmp_path / "recipe.yaml", {**values, "grpo_kl_coeff": 10.0, "ema_decay": 0.5})
    assert run_ranks(1, _three_starts, str(recipe), tmp_path) == [[0, 0, 0]]

    whole, parts = (rows(tmp_path / name, "metrics.jsonl") for name in ("whole", "parts"))
    assert [row["batch"] for row in parts] == [0, 1]
    assert [[row[key] for key in EXACT] for row in parts] == [[row[key] for key in EXACT] for row in whole]
    assert whole[0]["kl_loss"] == 0.0, "the start does not diverge from itself"
    # Had the second start measured from the checkpoint, its first batch would not diverge either.
    assert whole[1]["kl_loss"] > 0
    assert all(row["ratio_max_dev"] == 0 and row["grad_norm"] > 0 for row in whole)

    averages, weights = (_tensors(tmp_path / "whole" / "checkpoint-2", part) for part in ("ema", "model"))
    resumed = _tensors(tmp_path / "parts" / "checkpoint-2", "ema")
    assert averages.keys() == resumed.keys() == weights.keys()
    assert all(torch.equal(averages[name], resumed[name]) for name in averages)
    assert all(not torch.equal(averages[name], weights[name]) for name in averages)


def _one_start(recipe: str) -> Any:
    return run(recipe, ["--max_steps", "2"], MeanColour())


def test_adapters_of_two_experts_train_against_their_base(
    tmp_path: Path, tiny_a14b: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> None:
    values = tiny_recipe(tmp_path / "run", tiny_a14b, tiny_dataset, *tiny_evalkit)
    adapters = {"lora_rank": 4, "lora_module_prefix": "blocks.1", "learning_rate": 1e-2}
    changes = {"grpo_kl_coeff": 10.0, "ema_decay": 0.5, "grpo_num_sampling_steps": 4}
    recipe = write_recipe(tmp_path / "recipe.yaml", {**values, **adapters, **changes})
    assert run_ranks(1, _one_start, str(recipe)) == [0]

    first, second = rows(tmp_path / "run", "metrics.jsonl")
    assert first["kl_loss"] == 0.0 and second["kl_loss"] > 0
    assert first["replayed_per_expert"] == {"transformer": 2, "transformer_2": 1}
    assert first["replayed_samples"] == 4 * 3 and first["frozen_steps"] == 0
    averages, weights = (_tensors(tmp_path / "run" / "checkpoint-2", part) for part in ("ema", "model"))
    assert averages.keys() == weights.keys(), "no base weight is in the checkpoint"
    assert {name.partition(".blocks.1.")[0] for name in averages} == {"transformer", "transformer_2"}
    assert all(".lora_" in name and ".blocks.1." in name for name in averages)
