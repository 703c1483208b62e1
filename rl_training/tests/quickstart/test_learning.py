"""The quickstart learns, and only because of its reward: shortened runs of the product itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from rl_training.tests.ranks import free_port, run_ranks
from rl_training.tests.training.runs import run as train
from wan_trainer.config import trainer_root
from wan_trainer.tiny.warmup import WarmupSpec
from wan_trainer.tiny.world import World, build
from wan_trainer.types import EXIT_DONE

PASS = 6
"""Batches in one pass over the quickstart's 24 prompts: two passes score the same prompts."""

STEPS = 2 * PASS
FASTER = ["--learning_rate", "1e-3"]
"""Twice the quickstart's learning rate, for a fifth of its length."""
NOTHING_TO_LEARN = ["--dancegrpo_timestep_selection_ratio", "0.1", "--grpo_updates_per_rollout", "1"]
"""Where no weight moves, replaying more steps more often changes nothing."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The quickstart's model, data and evaluator, after a shorter warm-up."""
    return build(tmp_path_factory.mktemp("world"), warmup=WarmupSpec(steps=500))


def _flags(world: World, run: Path, *overrides: str) -> list[str]:
    flags = ["--device", "cpu", *world.overrides, "--output_dir", str(run)]
    flags += ["--vbvr_reward_tmp_dir", str(run.parent / "scratch"), "--max_steps", str(STEPS)]
    return [*flags, "--save_steps", "0", "--rollout_video_every_steps", "0", *overrides]


def _launch(flags: list[str]) -> None:
    """A run of two ranks, as the quickstart's."""
    launcher = trainer_root().parent / "scripts" / "train" / "grpo_multinode.fish"
    command = ["fish", str(launcher), "--nproc", "2", "--config", "configs/quickstart.yaml", *flags]
    rendezvous = {"MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    environment = {name: value for name, value in os.environ.items() if name not in rendezvous}
    environment["MASTER_PORT"] = str(free_port())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def _train(flags: list[str]) -> None:
    """A run of one rank, without launcher and preflight."""
    config = str(trainer_root() / "configs" / "quickstart.yaml")
    assert run_ranks(1, train, config, flags, timeout_s=540) == [EXIT_DONE]


def _passes(run: Path) -> tuple[float, float]:
    """Mean score of the first and of the second pass."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    assert all(row["ratio_max_dev"] == 0.0 for row in rows), "an unchanged policy replays with ratio 1"
    assert all(row["reward_valid_fraction"] == 1.0 for row in rows)
    scores = [row["components"]["score"] for row in rows]
    return sum(scores[:PASS]) / PASS, sum(scores[PASS:]) / PASS


@pytest.mark.slow
def test_the_reward_rises(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _launch(_flags(world, run, *FASTER))
    first, second = _passes(run)
    assert second > first + 0.08


@pytest.mark.slow
def test_without_a_learning_rate_nothing_rises(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _train(_flags(world, run, "--learning_rate", "0", *NOTHING_TO_LEARN))
    first, second = _passes(run)
    assert abs(second - first) <= 0.03


@pytest.mark.slow
def test_with_the_reward_negated_the_score_falls(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _train(_flags(world, run, *FASTER, "--reward_weights", json.dumps({"score": -1})))
    first, second = _passes(run)
    assert second < first - 0.03
