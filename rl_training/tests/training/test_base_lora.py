"""Runs on a base LoRA: what a start, a resume and another run's start ask of it, and what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import MeanColour, rows, run, tiny_recipe, write_recipe
from wan_trainer.models.wan.base_lora_files import base_lora_sha256

EXPERTS = ["transformer", "transformer_2"]


def lora_file(path: Path, scale: float = 0.3) -> Path:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"transformer.blocks.{block}.attn1.to_v.lora_{side}.weight": scale
        * torch.randn(shape, generator=generator)
        for block in range(2)
        for side, shape in (("A", (2, 64)), ("B", (64, 2)))
    }
    save_file(tensors, path)
    return path


def _starts(recipe: str, root: str, lora: str) -> dict[str, Any]:
    """What each start of some runs ended with, in one process."""
    ended: dict[str, Any] = {}

    def start(name: str, out: str, *words: str) -> None:
        ended[name] = run(recipe, ["--output_dir", f"{root}/{out}", *words], MeanColour())

    on_it = ("--base_lora", lora)
    start("whole", "whole", *on_it, "--max_steps", "2")
    start("part", "parts", *on_it, "--max_steps", "1")
    start("resumed", "parts", *on_it, "--max_steps", "2")
    start("plain", "plain", "--max_steps", "1")
    start("dropped", "parts", "--max_steps", "3")
    checkpoint = ("--resume_from", f"{root}/whole", "--max_steps", "1", "--grpo_kl_coeff", "0")
    start("from it", "second", *on_it, *checkpoint)
    start("from it without", "third", *checkpoint)
    lora_file(Path(lora), scale=0.4)
    start("changed", "parts", *on_it, "--max_steps", "3")
    Path(lora).unlink()
    start("gone", "fourth", *on_it)
    start("prefix", "fourth", "--lora_module_prefix", "transformer_3")
    return ended


def test_runs_on_a_base_lora(
    tmp_path: Path, tiny_a14b: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> None:
    values = tiny_recipe(tmp_path / "run", tiny_a14b, tiny_dataset, *tiny_evalkit)
    changes = {
        "lora_rank": 4,
        "lora_target_modules": ["to_q", "ffn.net.2"],
        "lora_module_prefix": "low_noise",
        "grpo_kl_coeff": 1.0,
        "grpo_num_sampling_steps": 4,
        "dancegrpo_timestep_selection_ratio": 1.0,
        "save_steps": 1,
        "lr_scheduler": "constant",
        "learning_rate": 1e-2,
    }
    recipe = write_recipe(tmp_path / "recipe.yaml", {**values, **changes})
    lora = lora_file(tmp_path / "base.safetensors")
    digest = base_lora_sha256(lora, EXPERTS)
    (ended,) = run_ranks(1, _starts, str(recipe), str(tmp_path), str(lora))

    done = ("whole", "part", "resumed", "plain", "from it")
    assert {name: ended[name] for name in done} == dict.fromkeys(done, 0)
    metrics = {name: rows(tmp_path / name, "metrics.jsonl") for name in ("whole", "parts", "plain")}
    exact = ("kl_loss", "policy_loss", "reward_mean", "grad_norm")
    parts, whole = ([[row[key] for key in exact] for row in metrics[name]] for name in ("parts", "whole"))
    assert parts == whole
    assert metrics["whole"][0]["kl_loss"] == 0.0, "the reference has it too"
    assert metrics["whole"][0]["reward_mean"] != metrics["plain"][0]["reward_mean"], "and it changes rollouts"

    record = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert record["base_lora"] == {"sha256": digest}
    assert record["contract"]["values"]["model"]["base_lora_sha256"] == digest
    kinds = {(kind["expert"], kind["module"]): kind for kind in record["trained"]}
    assert kinds.keys() == {("transformer_2", "to_q"), ("transformer_2", "ffn.net.2")}
    # Two blocks, self- and cross-attention: 64 -> 64 at rank 4; the feed-forward layer 128 -> 64.
    to_q, ffn = kinds["transformer_2", "to_q"], kinds["transformer_2", "ffn.net.2"]
    assert (to_q["layers"], to_q["lora_a"], to_q["lora_b"]) == (4, 4 * 256, 4 * 256)
    assert (ffn["layers"], ffn["lora_a"], ffn["lora_b"]) == (2, 2 * 512, 2 * 256)
    assert ffn["elements"] == ffn["lora_a"] + ffn["lora_b"]

    (line,) = [line for line in ended["changed"]]
    assert line.startswith("base_lora_sha256: ") and "differs from" in line and digest in line
    assert [line.partition(":")[0] for line in ended["dropped"]] == ["base_lora", "base_lora_sha256"]
    (line,) = ended["from it without"]
    assert line.startswith("base_lora: null is not what ") and str(lora) in line
    (line,) = ended["gone"]
    assert line == f"base_lora: {lora} does not exist: put the adapter there, or set --base_lora null"
    (line,) = ended["prefix"]
    assert "under lora_module_prefix transformer_3" in line and "transformer, transformer_2" in line
    assert not (tmp_path / "fourth" / "metrics.jsonl").exists()
