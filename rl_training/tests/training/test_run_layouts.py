"""A whole run of two experts on tensor-parallel ranks, continued compiled on two nodes of one rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.test_run import recipe  # noqa: F401 - a fixture
from wan_trainer.config import load_with_sources
from wan_trainer.training.run import plan_start, train
from wan_trainer.types import UserError


def _train(config: str, nproc: int, overrides: list[str]) -> Any:
    """`wan-trainer train` on this rank of nodes of `nproc` ranks each."""
    os.environ["LOCAL_WORLD_SIZE"] = str(nproc)
    try:
        return train(plan_start(load_with_sources(config, overrides)))
    except UserError as error:
        return list(error.problems)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_tensor_parallel_ranks_train_both_experts_and_another_layout_goes_on(
    recipe: Path,  # noqa: F811
    tiny_a14b: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    model = ["--model_path", str(tiny_a14b), "--model_family", "i2v-a14b", "--grpo_sample_batch_size", "2"]
    tensor = [*model, "--tensor_parallel_size", "2", "--gradient_checkpointing", "--max_steps", "1"]
    assert run_ranks(4, _train, str(recipe), 4, [*tensor, "--save_steps", "1"]) == [0] * 4
    nodes = [*model, "--hsdp", "--max_steps", "2", "--save_steps", "1", "--torch_compile"]
    assert run_ranks(2, _train, str(recipe), 1, nodes) == [0] * 2

    metrics = _rows(run / "metrics.jsonl")
    assert [row["batch"] for row in metrics] == [0, 1]
    for row in metrics:
        assert row["ratio_max_dev"] == 0 and row["grad_norm"] > 0
        assert row["replayed_per_expert"] == {"transformer": 2, "transformer_2": 1}
    rewards = _rows(run / "rewards.jsonl")
    seen = [(row["step"], row["prompt"], row["member"]) for row in rewards]
    assert sorted(seen) == [(s, p, m) for s in range(2) for p in range(2) for m in range(4)]
    first = [row for row in _rows(run / "timeline.jsonl") if row["step"] == 0]
    ranks = {phase: {row["rank"] for row in first if row["phase"] == phase} for phase in ("sample", "decode")}
    assert ranks == {"sample": {0, 1, 2, 3}, "decode": {0, 2}}
    topology = json.loads((run / "run.json").read_text())["topology"]
    assert (topology["tp"], topology["dp_replicate"], topology["dp_shard"]) == (1, 2, 1)
