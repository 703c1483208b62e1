"""The quickstart learns, and only because of its reward: shortened runs of the product itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rl_training.tests.ranks import free_port, run_ranks
from rl_training.tests.training.runs import run as train
from wan_trainer.config import trainer_root
from wan_trainer.recording.manifest import latest_checkpoint
from wan_trainer.tiny.warmup import WarmupSpec
from wan_trainer.tiny.world import World, build
from wan_trainer.types import EXIT_DONE

pytestmark = pytest.mark.slow

CONFIG = trainer_root() / "configs" / "quickstart.yaml"
PASS = 3
"""Batches in one pass over the quickstart's 24 prompts: two passes score the same prompts."""

BATCH = ("--batch_size", "8", "--expected_global_prompts", "8", "--grpo_group_size", "4")
"""As many rollouts as the quickstart's, of twice as many prompts."""

STEPS = 2 * PASS
FASTER = ("--learning_rate", "1e-3")
"""Twice the quickstart's learning rate, for a tenth of its length."""

RUNS = {
    "negated": (*FASTER, "--reward_weights", json.dumps({"score": -1})),
    # Where no weight moves, replaying more steps more often changes nothing.
    "untaught": (
        *("--learning_rate", "0"),
        *("--dancegrpo_timestep_selection_ratio", "0.1", "--grpo_updates_per_rollout", "1"),
    ),
}


class Scores(NamedTuple):
    """Mean scores of a run: of its first batch, which the untrained policy drew, and of both passes."""

    untrained: float
    first: float
    second: float


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The quickstart's model, data and evaluator, after a shorter warm-up."""
    return build(tmp_path_factory.mktemp("world"), warmup=WarmupSpec(steps=250))


def _launch(flags: list[str]) -> None:
    """A run of two ranks, as the quickstart's."""
    launcher = trainer_root().parent / "scripts" / "train" / "grpo_multinode.fish"
    rendezvous = {"MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    environment = {name: value for name, value in os.environ.items() if name not in rendezvous}
    done = subprocess.run(
        ["fish", str(launcher), "--nproc", "2", "--config", "configs/quickstart.yaml", *flags],
        env=environment | {"MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == EXIT_DONE, done.stderr[-4000:]


def _flags(world: World, root: Path) -> list[str]:
    flags = ["--device", "cpu", *world.overrides, "--vbvr_reward_tmp_dir", str(root / "scratch"), *BATCH]
    return [*flags, "--max_steps", str(STEPS), "--save_steps", "0", "--rollout_video_every_steps", "0"]


def _train_all(root: str, flags: list[str]) -> list[int]:
    """The runs, one after the other on one rank, without launcher and preflight."""
    return [train(str(CONFIG), [*flags, "--output_dir", f"{root}/{name}", *RUNS[name]]) for name in RUNS]


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all runs: the same prompts and the same noise in all of them. One learns what it
    should, through the launcher, and `RUNS` do not."""
    root = tmp_path_factory.mktemp("runs")
    flags = _flags(world, root)
    _launch([*flags, "--output_dir", str(root / "taught"), *FASTER])
    assert run_ranks(1, _train_all, str(root), flags, timeout_s=540) == [[EXIT_DONE] * len(RUNS)]
    return root


def _scores(run: Path) -> Scores:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    assert all(row["ratio_max_dev"] == 0.0 for row in rows), "an unchanged policy replays with ratio 1"
    assert all(row["reward_valid_fraction"] == 1.0 for row in rows)
    scores = [row["components"]["score"] for row in rows]
    return Scores(scores[0], sum(scores[:PASS]) / PASS, sum(scores[PASS:]) / PASS)


def test_the_reward_rises(runs: Path) -> None:
    taught, untaught = _scores(runs / "taught"), _scores(runs / "untaught")
    assert taught.untrained == pytest.approx(untaught.untrained, abs=1e-6)
    assert taught.second > untaught.second + 0.08
    assert taught.second > taught.first + 0.05


def test_without_a_learning_rate_nothing_is_learned(world: World, runs: Path, tmp_path: Path) -> None:
    checkpoint = latest_checkpoint(runs / "untaught")
    assert checkpoint is not None
    dcp_to_torch_save(checkpoint / "state", tmp_path / "state.pt")
    trained = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    given = load_file(next((world.model / "transformer").glob("*.safetensors")))
    assert {name.removeprefix("transformer.") for name in trained} == given.keys()
    assert all(torch.equal(trained[f"transformer.{name}"], value) for name, value in given.items())
    untaught = _scores(runs / "untaught")
    assert abs(untaught.second - untaught.first) <= 0.03


def test_with_the_reward_negated_the_score_falls(runs: Path) -> None:
    negated, untaught = _scores(runs / "negated"), _scores(runs / "untaught")
    assert negated.untrained == pytest.approx(untaught.untrained, abs=1e-6)
    assert negated.second < untaught.second - 0.03
    assert negated.second < negated.first - 0.03
