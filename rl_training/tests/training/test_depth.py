"""The replay queue in whole runs on a tiny Wan model: depths 0 to 3, save intervals, epochs, stops."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.runs import MeanColour, rows, run, tiny_recipe, write_recipe
from wan_trainer.config import load_with_sources
from wan_trainer.data.dataset import load_dataset
from wan_trainer.data.loader import batches
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.recording.clock import Clock
from wan_trainer.recording.run_dir import NullRunLog
from wan_trainer.training.assembly import Model, build_grpo, build_model, build_updater
from wan_trainer.training.checkpoint import load_checkpoint, read_train_state
from wan_trainer.training.observer import RunObserver
from wan_trainer.training.run import plan_start
from wan_trainer.training.session import local_prompts
from wan_trainer.types import EXIT_DONE, EXIT_STOPPED, PendingRewards, RewardRequest

pytestmark = pytest.mark.slow

# Eight samples in batches of two: an epoch ends behind batch 4, in the middle of the interval from 3 to 6.
BATCHES, SAVES, EPOCH = 8, (3, 6, 8), 4
STOP = 2  # an agreed stop behind this batch: two rollouts are pending at depth 2
DRAINS = sorted({*SAVES, EPOCH})
# Depth 1 is that of the accumulated run, 2 of the stopped one.
DEPTHS = (0, 2)
TWO_EPOCHS = ["--num_epochs", "2", "--save_steps", "3", "--keep_checkpoints", "0"]
# Every stale ratio of this learning rate lies between the two clip ranges.
CLIP = ["--grpo_clip_range", "1e-6", "--grpo_delayed_replay_clip_range", "0.9"]


def _overrides(out: Path, name: str, depth: int, *more: str) -> list[str]:
    return ["--output_dir", str(out / name), "--max_off_policy_steps", str(depth), *TWO_EPOCHS, *CLIP, *more]


class Interrupted(MeanColour):
    """A reward during which the run is asked to stop: while batch `at` is being drawn."""

    def __init__(self, at: int) -> None:
        self._at = at

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        if requests[0].id.step == self._at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().submit(videos, requests)


def _train_all(recipe: str, out: Path) -> dict[str, Any]:
    """Every run of this module in one process."""
    seen: dict[str, Any] = {}
    for depth in DEPTHS:
        seen[f"depth {depth}"] = run(recipe, _overrides(out, f"depth-{depth}", depth), MeanColour())
    window = ["--gradient_accumulation_steps", "2", "--save_steps", "4"]
    seen["accumulated"] = run(recipe, _overrides(out, "accumulated", 1, *window), MeanColour())
    stopped = _overrides(out, "stopped", 2)
    seen["stopped"] = run(recipe, stopped, Interrupted(STOP - 1))
    seen["continued"] = run(recipe, stopped, MeanColour())
    seen["plain"] = _plain_loop(recipe, _overrides(out, "plain", 0))
    seen["scheduled"] = _saved_weights(recipe, _overrides(out, "depth-0", 0), out / "depth-0")
    return seen


def _weights(model: Model) -> dict[str, bytes]:
    """Every trained tensor, bit for bit."""
    weights: dict[str, bytes] = {}
    for name, parameter in model.policy.trainable():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[name] = whole.detach().numpy().tobytes()
    return weights


def _plain_loop(recipe: str, overrides: list[str]) -> dict[str, bytes]:
    """Prepare, update, prepare, update: the weights after a run without scheduler, boundaries or saves."""
    start = plan_start(load_with_sources(recipe, overrides))
    spec, topology = start.spec, start.topology
    mesh = init_mesh("cpu", 60)
    dataset = load_dataset(spec.data)
    model = build_model(spec, mesh)
    grpo = build_grpo(
        spec,
        topology,
        mesh,
        model,
        reward=MeanColour(),
        updater=build_updater(spec, model, BATCHES, 0),
        clock=Clock(mesh.rank),
        observer=RunObserver(
            NullRunLog(spec.output.output_dir), every_steps=0, total_batches=BATCHES, fps=16
        ),
        policy_version=0,
    )
    for batch in batches(
        dataset,
        spec.data,
        batch_size=topology.prompts,
        num_batches=BATCHES,
        start=0,
        local_prompts=local_prompts(topology, mesh),
        with_first_frames=True,
    ):
        assert grpo.update(grpo.prepare(batch, batch.step)) is not None
    weights = _weights(model)
    torch.distributed.destroy_process_group()
    return weights


def _saved_weights(recipe: str, overrides: list[str], run_dir: Path) -> dict[str, bytes]:
    spec = plan_start(load_with_sources(recipe, overrides)).spec
    mesh: Mesh = init_mesh("cpu", 60)
    model = build_model(spec, mesh)
    load_checkpoint(run_dir / f"checkpoint-{BATCHES}", model.policy, model.optimizer, mesh)
    weights = _weights(model)
    torch.distributed.destroy_process_group()
    return weights


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_ti2v: Path,
    tiny_dataset: Path,
    tiny_evalkit: Any,
) -> tuple[Path, dict[str, Any]]:
    """The directory of all runs, and what each came to."""
    out = tmp_path_factory.mktemp("depth")
    recipe = tiny_recipe(out / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    (seen,) = run_ranks(1, _train_all, str(write_recipe(out / "recipe.yaml", recipe)), out)
    return out, seen


def _expected_ages(depth: int, drains: Sequence[int]) -> list[int]:
    """The queue fills again behind every drain: the n-th batch of a segment is min(n, depth) updates old."""
    ages: list[int] = []
    for batch in range(BATCHES):
        segment = max((drain for drain in drains if drain <= batch), default=0)
        ages.append(min(batch - segment, depth))
    return ages


@pytest.mark.parametrize("depth", DEPTHS)
def test_updates_are_batches_and_saves_come_at_exact_steps(
    trained: tuple[Path, dict[str, Any]], depth: int
) -> None:
    out, seen = trained
    assert seen[f"depth {depth}"] == EXIT_DONE
    run_dir = out / f"depth-{depth}"
    metrics = rows(run_dir, "metrics.jsonl")
    assert [row["batch"] for row in metrics] == list(range(BATCHES))
    assert [row["step"] for row in metrics] == list(range(1, BATCHES + 1))
    assert [row["epoch"] for row in metrics] == [0] * EPOCH + [1] * (BATCHES - EPOCH)
    assert [row["policy_version"] for row in metrics] == list(range(1, BATCHES + 1))
    assert [row["policy_age"] for row in metrics] == _expected_ages(depth, DRAINS)
    saved = sorted(int(path.name.rpartition("-")[2]) for path in run_dir.glob("checkpoint-*"))
    assert saved == list(SAVES)
    for step in SAVES:
        state = read_train_state(run_dir / f"checkpoint-{step}")
        # Were a rollout pending, fewer updates than batches would have been made.
        assert (state.step, state.updates, state.policy_version) == (step, step, step)
        assert state.epoch == step // EPOCH
    ids = [(row["step"], row["prompt"], row["member"]) for row in rows(run_dir, "rewards.jsonl")]
    assert ids == [(batch, p, m) for batch in range(BATCHES) for p in range(2) for m in range(2)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_learning_rate_reaches_its_end_with_the_last_batch(
    trained: tuple[Path, dict[str, Any]], depth: int
) -> None:
    metrics = rows(trained[0] / f"depth-{depth}", "metrics.jsonl")
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * update / BATCHES)) for update in range(BATCHES)]
    assert [row["lr"] for row in metrics] == pytest.approx(expected)


@pytest.mark.parametrize("depth", DEPTHS)
def test_stale_rollouts_have_their_own_clip_range(trained: tuple[Path, dict[str, Any]], depth: int) -> None:
    metrics = rows(trained[0] / f"depth-{depth}", "metrics.jsonl")
    for row in metrics:
        assert (row["ratio_max_dev"] > 1e-6) == (row["policy_age"] > 0), row
        # The on-policy range would clip every stale ratio.
        assert row["clip_fraction"] == 0
    assert any(row["policy_age"] for row in metrics) == (depth > 0)


def test_depth_zero_equals_a_loop_without_a_scheduler_bit_for_bit(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    plain, scheduled = trained[1]["plain"], trained[1]["scheduled"]
    assert plain.keys() == scheduled.keys()
    assert [name for name in plain if plain[name] != scheduled[name]] == []


def test_accumulation_makes_half_the_updates_and_drops_no_batch(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    out, seen = trained
    assert seen["accumulated"] == EXIT_DONE
    metrics = rows(out / "accumulated", "metrics.jsonl")
    assert [(row["step"], row["batch"]) for row in metrics] == [(1, 1), (2, 3), (3, 5), (4, 7)]
    # The first rollout of a window was drawn before the last update, unless a drain came between.
    assert [row["policy_age"] for row in metrics] == [0, 1, 0, 1]
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * update / 4)) for update in range(4)]
    assert [row["lr"] for row in metrics] == pytest.approx(expected)
    for step in (4, 8):
        state = read_train_state(out / "accumulated" / f"checkpoint-{step}")
        assert (state.step, state.updates) == (step, step // 2)
    assert len(rows(out / "accumulated", "rewards.jsonl")) == BATCHES * 4


def test_an_agreed_stop_trains_what_was_fetched_and_the_rest_follows(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    out, seen = trained
    assert (seen["stopped"], seen["continued"]) == (EXIT_STOPPED, EXIT_DONE)
    run_dir = out / "stopped"
    state = read_train_state(run_dir / f"checkpoint-{STOP}")
    assert (state.step, state.updates, state.policy_version) == (STOP, STOP, STOP)
    metrics = rows(run_dir, "metrics.jsonl")
    assert [row["batch"] for row in metrics] == list(range(BATCHES))
    assert [row["policy_age"] for row in metrics] == _expected_ages(2, [STOP, *DRAINS])
    samples = [row["sample_id"] for row in rows(run_dir, "rewards.jsonl")]
    assert all(samples.count(sample) == 4 for sample in set(samples)), "two epochs of two members each"
    assert len(set(samples)) == 8
