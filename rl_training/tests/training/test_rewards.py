"""A run on two rewards, the evaluator and a function of the user's own, with a third that is only watched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import rows, run, tiny_recipe, write_recipe
from wan_trainer.types import EXIT_DONE

WATCHED = """
def motion(frames, prompt):
    if frames[-1].mean() > frames[-1].max() / 2:
        raise ValueError("too bright to tell")
    return float(abs(frames[-1].astype(float) - frames[0]).mean())

def contrast(frames, prompt):
    return float(frames.std()) / 128
"""


def test_two_rewards_train_and_a_third_is_only_logged(
    tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> None:
    (tmp_path / "watched.py").write_text(WATCHED)
    values = tiny_recipe(
        tmp_path / "run", tiny_ti2v, tiny_dataset, tiny_evalkit.directory, tiny_evalkit.sha256
    )
    values |= {
        "grpo_reward_fn": ["vbvr_rule", {"_target_": "watched.contrast"}],
        "reward_weights": {"vbvr_rule": 0.5, "contrast": -2.0},
        "reward_monitor": {"_target_": "watched.motion"},
        "max_steps": 2,
        "vbvr_reward_cpu_workers": 1,
    }
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    assert run_ranks(1, run, str(recipe)) == [EXIT_DONE]

    metrics, rewards = (rows(tmp_path / "run", f"{name}.jsonl") for name in ("metrics", "rewards"))
    assert len(metrics) == 2 and len(rewards) == 2 * 4
    for row in rewards:
        scores = row["components"]
        assert row["error"] is None
        expected = 0.5 * scores["vbvr_rule.score"] - 2.0 * scores["contrast.score"]
        assert row["reward"] == pytest.approx(expected, abs=1e-6)
        assert scores["monitor.motion.missing"] == ("monitor.motion.score" not in scores)
    for batch, row in enumerate(metrics):
        own = [r for r in rewards if r["step"] == batch]
        assert row["reward_valid_fraction"] == 1.0
        for name in ("vbvr_rule.score", "contrast.score", "monitor.motion.missing"):
            mean = sum(r["components"][name] for r in own) / len(own)
            assert row["components"][name] == pytest.approx(mean, abs=1e-9)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert set(record["targets"]) == {"grpo_reward_fn[contrast]", "reward_monitor"}
    assert record["evaluator"]["source_sha256"] == tiny_evalkit.sha256
