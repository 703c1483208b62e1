"""GRPO on a real GPU in bfloat16: ratio 1 before the first update, peak memory in the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import rows, run, tiny_recipe, write_recipe
from wan_trainer.preflight.cuda import cuda_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_devices().count == 0, reason="needs a CUDA device"),
]
COMPILED = ["--torch_compile", "--torch_compile_backend", "inductor"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--gradient_checkpointing"],
        COMPILED,
        ["--use_liger_kernel"],
        [*COMPILED, "--use_liger_kernel", "--gradient_checkpointing"],
        ["--grpo_offload_inference_models"],
    ],
    ids=lambda flags: " ".join(flags) or "eager",
)
def test_updates_on_cuda_start_from_ratio_one(
    tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit, flags: list[str]
) -> None:
    values = tiny_recipe(
        tmp_path / "run", tiny_ti2v, tiny_dataset, tiny_evalkit.directory, tiny_evalkit.sha256
    )
    values |= {
        "device": "cuda",
        "param_dtype": "bfloat16",
        "vbvr_reward_prepared_width": 64,
        "vbvr_reward_prepared_height": 64,
        "max_steps": 2,
        "grpo_clip_range": 1e-4,
    }
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    # The gate itself stops a run whose ratio leaves its tolerance, a tenth of the clip range.
    assert run_ranks(1, run, str(recipe), flags, timeout_s=500) == [0]
    metrics = rows(tmp_path / "run", "metrics.jsonl")
    assert len(metrics) == 2
    assert metrics[0]["ratio_max_dev"] <= 1e-5
    assert all(row["peak_memory_gib"] > 0 for row in metrics)
    assert all(row["grad_norm"] > 0 for row in metrics if row["zero_std_groups"] < 2)
