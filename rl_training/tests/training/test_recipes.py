"""The four reference recipes train: nothing of them is overridden but paths, sizes and the device.

The topologies are small ones with the structure of the production runs. The judge of the VLM recipe is
replaced by the rule reward; its waves, delay and layout are its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import rows, run, write_recipe
from wan_trainer.config import trainer_root
from wan_trainer.types import EXIT_DONE

pytestmark = pytest.mark.slow

RANKS, STEPS = 4, 4


def _train(recipe: str, overrides: list[str], ranks_per_node: int) -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    os.environ["WANDB_MODE"] = "disabled"
    return run(recipe, overrides)


def _recipe(name: str, scratch: Path) -> str:
    """The recipe's own file, or, for the VLM recipe, a copy whose judge gave way to the rule reward."""
    path = trainer_root() / "configs" / f"{name}.yaml"
    values = yaml.safe_load(path.read_text())
    if values["grpo_reward_fn"] == "vbvr_rule":
        return str(path)
    kept = {key: value for key, value in values.items() if not key.startswith("vlm_")}
    return str(write_recipe(scratch / "rule.yaml", kept | {"grpo_reward_fn": "vbvr_rule"}))


@pytest.fixture
def small(tmp_path: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit) -> list[str]:
    """Paths and sizes that every recipe needs."""
    values = {
        "device": "cpu",
        "output_dir": tmp_path / "run",
        "dataset_json": tiny_dataset,
        "dataset_size": 8,
        "num_frames": 9,
        "height": 64,
        "width": 64,
        "num_workers": 0,
        "max_steps": STEPS,
        "grpo_group_size": 2,
        "grpo_sample_batch_size": 1,
        "grpo_train_sample_batch_size": 1,
        "grpo_num_sampling_steps": 6,
        "vbvr_reward_evalkit_dir": tiny_evalkit.directory,
        "vbvr_reward_evalkit_source_sha256": tiny_evalkit.sha256,
        "vbvr_reward_tmp_dir": tmp_path / "scratch",
        "vbvr_reward_cpu_workers": 1,
        "vbvr_reward_cpu_threads_per_worker": 1,
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def _flags(**values: object) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def _outcome(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics and record of a run, after what holds for each recipe."""
    metrics = rows(run_dir, "metrics.jsonl")
    assert [row["batch"] for row in metrics] == list(range(STEPS))
    assert all(row["grad_norm"] > 0 and not row["skipped"] for row in metrics if row["zero_std_groups"] == 0)
    assert all(row["reward_valid_fraction"] == 1.0 for row in metrics)
    assert all(row["ratio_max_dev"] < 1e-6 for row in metrics if row["policy_age"] == 0)
    record = json.loads((run_dir / "run.json").read_text())
    assert record["final_checkpoint"]["step"] == STEPS and record["final_checkpoint"]["verified"]
    return metrics, record


@pytest.mark.parametrize("recipe", ["train_rl_5b_cps", "train_rl_5b_sde", "train_rl_5b_vlm"])
def test_the_5b_recipes_train_with_ranks_that_share_prompts_on_two_nodes(
    recipe: str, small: list[str], tmp_path: Path, tiny_ti2v: Path
) -> None:
    judge = recipe.endswith("vlm")
    prompts = 4 if judge else 2
    overrides = _flags(
        model_path=tiny_ti2v,
        batch_size=prompts,
        expected_global_prompts=prompts,
        grpo_shared_prompt_microbatch_size=2,
    )
    if not judge:
        overrides += _flags(vbvr_reward_easyocr_module_path=tmp_path)

    path = _recipe(recipe, tmp_path)
    assert run_ranks(RANKS, _train, path, [*small, *overrides], 2) == [EXIT_DONE] * RANKS

    metrics, record = _outcome(tmp_path / "run")
    # Delayed, and drained at the end of each epoch, which four prompts a batch reach twice.
    assert [row["policy_age"] for row in metrics] == ([0, 1, 0, 1] if judge else [0, 1, 1, 1])
    topology = record["topology"]
    assert (topology["dp_replicate"], topology["dp_shard"], topology["tp"]) == (2, 2, 1)
    assert topology["prompts"] == prompts and topology["waves"] == prompts // 2
    assert topology["rollouts_per_rank_wave"] * RANKS == 2 * 2, "two ranks hold one prompt's group"
    assert record["sampler"]["kind"] == ("dancegrpo" if recipe.endswith("sde") else "flowcps")


def test_the_a14b_recipe_trains_both_experts_on_tensor_parallel_replicas(
    small: list[str], tmp_path: Path, tiny_a14b: Path
) -> None:
    overrides = _flags(
        model_path=tiny_a14b,
        # Starting from another checkpoint's weights is not built: the model's own are the start.
        resume_from="null",
        reset_dataloader="null",
        batch_size=1,
        expected_global_prompts=2,
        vbvr_reward_easyocr_module_path=tmp_path,
    )
    path = _recipe("train_rl_a14b_rule", tmp_path)
    assert run_ranks(RANKS, _train, path, [*small, *overrides], RANKS) == [EXIT_DONE] * RANKS

    metrics, record = _outcome(tmp_path / "run")
    assert all(row["policy_age"] == 0 for row in metrics)
    assert {expert for row in metrics for expert in row["replayed_per_expert"]} == {
        "transformer",
        "transformer_2",
    }
    topology = record["topology"]
    assert (topology["tp"], topology["dp"], topology["prompts"]) == (2, 2, 2)
    assert record["sampler"]["eta_range"] == [0.0, 1.0]
