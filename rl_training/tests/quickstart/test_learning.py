"""The quickstart learns, and only because of its reward: shortened runs of the product itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from rl_training.tests.ranks import free_port
from wan_trainer.config import trainer_root
from wan_trainer.tiny.world import World, build

PASS = 6
"""Batches in one pass over the quickstart's 24 prompts: two passes score the same prompts."""

STEPS = 2 * PASS
FASTER = ["--learning_rate", "1e-3"]
"""Twice the quickstart's learning rate, for a fifth of its length."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The quickstart's model, data and evaluator, warm-up included."""
    return build(tmp_path_factory.mktemp("world"))


def _scores(world: World, run: Path, *overrides: str, ranks: int) -> list[float]:
    """Raw score of every step of a run through the launcher."""
    launcher = trainer_root().parent / "scripts" / "train" / "grpo_multinode.fish"
    command = ["fish", str(launcher), "--nproc", str(ranks), "--config", "configs/quickstart.yaml"]
    command += ["--device", "cpu", *world.overrides, "--output_dir", str(run)]
    command += ["--vbvr_reward_tmp_dir", str(run.parent / "scratch"), "--max_steps", str(STEPS)]
    command += ["--save_steps", "0", "--rollout_video_every_steps", "0", *overrides]
    rendezvous = {"MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    environment = {name: value for name, value in os.environ.items() if name not in rendezvous}
    environment["MASTER_PORT"] = str(free_port())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    assert all(row["ratio_max_dev"] == 0.0 for row in rows), "an unchanged policy replays with ratio 1"
    assert all(row["reward_valid_fraction"] == 1.0 for row in rows)
    return [row["components"]["score"] for row in rows]


def _passes(scores: list[float]) -> tuple[float, float]:
    """Mean score of the first and of the second pass."""
    return sum(scores[:PASS]) / PASS, sum(scores[PASS:]) / PASS


@pytest.mark.slow
def test_the_reward_rises(world: World, tmp_path: Path) -> None:
    first, second = _passes(_scores(world, tmp_path / "run", *FASTER, ranks=2))
    assert second > first + 0.08


@pytest.mark.slow
def test_without_a_learning_rate_nothing_rises(world: World, tmp_path: Path) -> None:
    first, second = _passes(_scores(world, tmp_path / "run", "--learning_rate", "0", ranks=1))
    assert abs(second - first) <= 0.03


@pytest.mark.slow
def test_with_the_reward_negated_the_score_falls(world: World, tmp_path: Path) -> None:
    negated = ["--reward_weights", json.dumps({"score": -1})]
    first, second = _passes(_scores(world, tmp_path / "run", *FASTER, *negated, ranks=1))
    assert second < first - 0.03
