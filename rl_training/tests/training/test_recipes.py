"""The four reference recipes train: nothing of them is overridden but paths, sizes and the device.

The topologies are small ones with the structure of the production runs. The judge of the VLM recipe is a
service on loopback that speaks the OpenAI API.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_training.tests.ranks import run_ranks
from rl_training.tests.rewards.judge_server import TRIAL, Expected, JudgeServer
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import rows, run
from wan_trainer.config import trainer_root
from wan_trainer.rewards.judge_rubric import rubrics_sha256
from wan_trainer.training.checkpoint import read_train_state
from wan_trainer.types import EXIT_DONE

pytestmark = pytest.mark.slow

RANKS, STEPS = 2, 3
# Compiling takes a rank longer than training: one start of one recipe shows it.
UNCOMPILED = ["--torch_compile", "false"]


def _train(starts: list[tuple[str, list[str]]], ranks_per_node: int) -> list[Any]:
    """What each start of a recipe came to, one after the other on this rank."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    os.environ["WANDB_MODE"] = "disabled"
    return [run(recipe, overrides) for recipe, overrides in starts]


def _recipe(name: str) -> str:
    return str(trainer_root() / "configs" / f"{name}.yaml")


@pytest.fixture
def small(tmp_path: Path, tiny_dataset: Path) -> list[str]:
    """Paths and sizes that every recipe needs."""
    values = {
        "device": "cpu",
        "output_dir": tmp_path / "run",
        "dataset_json": tiny_dataset,
        "dataset_size": 8,
        "num_frames": 5,
        "height": 32,
        "width": 32,
        "num_workers": 0,
        "max_steps": STEPS,
        "grpo_group_size": 2,
        "grpo_sample_batch_size": 1,
        "grpo_train_sample_batch_size": 1,
        "grpo_num_sampling_steps": 4,
    }
    return _flags(**values)


@pytest.fixture
def rule(tmp_path: Path, tiny_evalkit: TinyEvalkit) -> list[str]:
    """Paths and sizes of the rule reward."""
    (tmp_path / "model").mkdir()
    for name in ("craft_mlt_25k.pth", "english_g2.pth"):
        (tmp_path / "model" / name).write_bytes(b"weights")
    return _flags(
        vbvr_reward_evalkit_dir=tiny_evalkit.directory,
        vbvr_reward_evalkit_source_sha256=tiny_evalkit.sha256,
        vbvr_reward_tmp_dir=tmp_path / "scratch",
        vbvr_reward_cpu_workers=1,
        vbvr_reward_cpu_threads_per_worker=1,
        vbvr_reward_easyocr_module_path=tmp_path,
    )


@pytest.fixture
def judge(tmp_path: Path, tiny_dataset: Path) -> Iterator[tuple[JudgeServer, list[str]]]:
    """A judge under the recipe's own model name, and where it and the tasks' rubrics are."""
    rubrics = tmp_path / "rubrics"
    rubrics.mkdir()
    for task in (tiny_dataset.parent / "raw").iterdir():
        text = "---\ncriteria: {light: 70, calm: 30}\n---\nHow bright is it?\n"
        (rubrics / f"{task.name}.md").write_text(text)
    server = JudgeServer(expected=Expected(frames=5, fps=16, longest_edge=512), model="qwen3.6-27b")
    yield (
        server,
        _flags(
            vlm_reward_base_url=server.url,
            vlm_reward_prompt_dir=rubrics,
            vlm_reward_prompt_sha256=rubrics_sha256(rubrics),
        ),
    )
    server.stop()


def _flags(**values: object) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def _outcome(run_dir: Path, steps: int = STEPS) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics and record of a run, after what holds for each recipe."""
    metrics = rows(run_dir, "metrics.jsonl")
    assert [row["batch"] for row in metrics] == list(range(steps))
    assert all(row["grad_norm"] > 0 and not row["skipped"] for row in metrics if row["zero_std_groups"] == 0)
    assert all(row["reward_valid_fraction"] == 1.0 for row in metrics)
    assert all(row["ratio_max_dev"] < 1e-6 for row in metrics if row["policy_age"] == 0)
    record = json.loads((run_dir / "run.json").read_text())
    assert record["final_checkpoint"]["step"] == steps and record["final_checkpoint"]["verified"]
    return metrics, record


def _sizes(prompts: int, wave: int = 1) -> list[str]:
    """Each wave is `wave` prompts, whose groups the ranks share."""
    return _flags(
        batch_size=prompts, expected_global_prompts=prompts, grpo_shared_prompt_microbatch_size=wave
    )


def _outcome_5b(
    run_dir: Path, prompts: int, wave: int = 1, steps: int = STEPS
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics and record of a 5B recipe on two nodes that share prompts."""
    metrics, record = _outcome(run_dir, steps)
    topology = record["topology"]
    assert (topology["dp_replicate"], topology["dp_shard"], topology["tp"]) == (2, 1, 1)
    assert topology["prompts"] == wave * topology["waves"] == prompts
    assert topology["rollouts_per_rank_wave"] == wave, "two ranks hold half of a group each"
    return metrics, record


def test_the_5b_rule_recipes_train_on_two_nodes_that_share_prompts(
    small: list[str], rule: list[str], tmp_path: Path, tiny_ti2v: Path
) -> None:
    flags = [*small, *rule, *UNCOMPILED, *_flags(model_path=tiny_ti2v), *_sizes(4, wave=2)]
    recipes = {"train_rl_5b_cps": "flowcps", "train_rl_5b_sde": "dancegrpo"}
    starts = [(_recipe(name), [*flags, *_flags(output_dir=tmp_path / name)]) for name in recipes]
    assert run_ranks(RANKS, _train, starts, 1) == [[EXIT_DONE] * 2] * RANKS
    for name, kind in recipes.items():
        metrics, record = _outcome_5b(tmp_path / name, 4, wave=2)
        # Delayed, and drained at the end of each epoch, which four prompts a batch reach behind the second.
        assert [row["policy_age"] for row in metrics] == [0, 1, 0]
        assert record["sampler"]["kind"] == kind


def test_the_5b_sde_recipe_trains_compiled(
    small: list[str], rule: list[str], tmp_path: Path, tiny_ti2v: Path
) -> None:
    flags = [*small, *rule, *_flags(model_path=tiny_ti2v, max_steps=1), *_sizes(2)]
    assert run_ranks(RANKS, _train, [(_recipe("train_rl_5b_sde"), flags)], 1) == [[EXIT_DONE]] * RANKS
    _outcome_5b(tmp_path / "run", 2, steps=1)


def test_the_5b_judge_recipe_trains_on_the_verdicts_of_a_service(
    small: list[str], judge: tuple[JudgeServer, list[str]], tmp_path: Path, tiny_ti2v: Path
) -> None:
    server, place = judge
    flags = [*small, *place, *UNCOMPILED, *_flags(model_path=tiny_ti2v), *_sizes(4)]
    assert run_ranks(RANKS, _train, [(_recipe("train_rl_5b_vlm"), flags)], 1) == [[EXIT_DONE]] * RANKS
    metrics, record = _outcome_5b(tmp_path / "run", 4)
    assert [row["policy_age"] for row in metrics] == [0, 1, 0]
    assert any(row["zero_std_groups"] == 0 for row in metrics), "verdicts differ, so that there is a gradient"
    assert record["sampler"]["kind"] == "flowcps"

    assert server.violations == []
    trials = [seen for seen in server.seen if seen.instruction == TRIAL]
    rewards = rows(tmp_path / "run", "rewards.jsonl")
    assert len(trials) == RANKS and len(rewards) == STEPS * 4 * 2
    assert len(server.seen) == len(trials) + len(rewards), "each rollout is asked about once"
    assert server.most_in_flight <= RANKS * 4
    judged = sorted(seen.share for seen in server.seen if seen.instruction != TRIAL)
    assert sorted(row["reward"] for row in rewards) == pytest.approx(judged, abs=1e-9)
    for row in rewards:
        assert row["components"] == pytest.approx(
            {"score": row["reward"], "light": row["reward"], "calm": row["reward"], "failed": 0.0}
        )


def test_the_a14b_recipe_trains_both_experts_on_tensor_parallel_replicas(
    small: list[str], rule: list[str], tmp_path: Path, tiny_a14b: Path
) -> None:
    supervised = tmp_path / "vbvr_pro_sft" / "checkpoint"
    for expert in ("transformer", "transformer_2"):
        shutil.copytree(tiny_a14b / expert, supervised / expert)
    overrides = _flags(
        model_path=tiny_a14b,
        # The recipe's supervised weights, as a Diffusers directory; it resets everything else.
        resume_from=supervised,
        batch_size=1,
        expected_global_prompts=2,
        # The fewest of which a batch replays steps of both experts.
        grpo_num_sampling_steps=6,
        # Delayed, the second would be an update old.
        max_steps=2,
    )
    flags = [*small, *rule, *UNCOMPILED, *overrides]
    assert run_ranks(4, _train, [(_recipe("train_rl_a14b_rule"), flags)], 4) == [[EXIT_DONE]] * 4

    metrics, record = _outcome(tmp_path / "run", steps=2)
    state = read_train_state(tmp_path / "run" / "checkpoint-2")
    assert state.started_from == str(supervised)
    assert all(row["policy_age"] == 0 for row in metrics)
    assert {expert for row in metrics for expert in row["replayed_per_expert"]} == {
        "transformer",
        "transformer_2",
    }
    topology = record["topology"]
    assert (topology["tp"], topology["dp"], topology["prompts"]) == (2, 2, 2)
    assert record["sampler"]["eta_range"] == [0.0, 1.0]
