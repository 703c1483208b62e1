from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest

from wan_trainer.digests import file_sha256
from wan_trainer.recording.identity import (
    AttentionIdentity,
    CodeIdentity,
    DatasetIdentity,
    EvaluatorIdentity,
    model_identity,
)
from wan_trainer.recording.run_record import RunFacts, SamplerRecord
from wan_trainer.types import EvaluationRecord, StepRecord


@dataclass(frozen=True)
class Layout:
    world: int
    ranks_per_prompt: Fraction


@pytest.fixture
def facts(tmp_path: Path) -> RunFacts:
    model = tmp_path / "model"
    (model / "vae").mkdir(parents=True)
    (model / "model_index.json").write_text("{}")
    (model / "vae" / "weights.safetensors").write_bytes(b"12345")
    manifest = tmp_path / "split.json"
    manifest.write_text("[]")
    sampler = SamplerRecord("flowcps", (1.0, 0.5, 0.0), 0.7, None, 1.0, 5.0, 0.5, False, 3)
    return RunFacts(
        algorithm="grpo",
        device="cpu",
        config_path=tmp_path / "c.yaml",
        config={"learning_rate": 1e-5, "vlm_reward_api_key": "hunter2", "seed": 3},
        sources={"learning_rate": "cli", "seed": "default"},
        overrides=("--learning_rate", "1e-5", "--vlm_reward_api_key", "hunter2", "--other_token=hunter2"),
        contract_digests={"model": "ab"},
        contract_values={"model": {"lora_rank": 8}},
        topology=Layout(2, Fraction(1, 2)),
        sampler=sampler,
        model=model_identity(model, "ti2v-5b"),
        dataset=DatasetIdentity(manifest, file_sha256(manifest), {"split.json": file_sha256(manifest)}, 12),
        evaluator=EvaluatorIdentity(tmp_path, "cd"),
        attention=AttentionIdentity("native"),
        code=CodeIdentity("f00", True, "abc", "diff --git a b"),
    )


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    base = StepRecord(
        step=1,
        batch=0,
        epoch=0,
        policy_loss=-1.23456789012e-7,
        kl_loss=0.0,
        reward_mean=0.5,
        reward_std=0.1,
        reward_valid_fraction=1.0,
        zero_std_groups=0,
        advantage_abs_mean=0.8,
        ratio_mean=1.0,
        ratio_max_dev=0.0,
        clip_fraction=0.0,
        approx_kl=0.0,
        policy_age=0,
        policy_version=0,
        grad_norm=0.3,
        lr=1e-5,
        prepare_s=1.0,
        reward_wait_s=0.1,
        replay_s=2.0,
        step_s=3.0,
        rollouts_per_s=4.0,
        peak_memory_gib=0.0,
        replayed_steps=16,
        components={"task_specific": 0.5},
    )

    def make(**changes: object) -> StepRecord:
        return replace(base, **changes)

    return make


@pytest.fixture
def evaluation_record() -> EvaluationRecord:
    return EvaluationRecord(
        batch=4,
        step=3,
        prompts=8,
        reward_mean=0.5,
        reward_std=0.1,
        reward_valid_fraction=0.75,
        components={"look": 0.25},
        seconds=61.0,
        error="timed out",
    )
