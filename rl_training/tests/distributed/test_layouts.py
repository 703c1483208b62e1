"""One GRPO update, its gradients and its checkpoints are the same on every layout of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from rl_training.tests.distributed.layouts import CASES, GROUP, LAYOUTS, PROMPTS, Setup, build, lay_out, whole
from rl_training.tests.ranks import run_ranks
from wan_trainer.distributed.collectives import barrier
from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.training.checkpoint import TrainState, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.slow

ROLLOUTS = PROMPTS * GROUP
# Every kind of split, with gradients reduced in the last backward and in every one: an update of four ranks
# takes seconds.
JOBS: dict[int, list[tuple[str, str]]] = {
    1: [("alone", "whole"), ("alone", "lora")],
    2: [("fsdp2", "in waves"), ("fsdp2", "low expert"), ("replicas2", "whole"), ("tp2", "compiled")],
    4: [("hsdp2x2", "whole"), ("tp2 x fsdp2", "in waves"), ("tp2 x fsdp2", "lora")],
}
MOVES: dict[int, list[tuple[str, str]]] = {
    1: [("hsdp2x2", "alone"), ("tp2 x fsdp2", "alone")],
    2: [("alone", "tp2")],
    4: [("fsdp2", "tp2 x fsdp2")],
}
"""Checkpoints saved on one layout and loaded on another."""
SAVED = {saved for moves in MOVES.values() for saved, _ in moves}


def train_and_save(path: Path, out: Path, jobs: list[tuple[str, str]], moves: list[tuple[str, str]]) -> Any:
    """Updates and checkpoints of one launch; what rank 0 knows whole goes to `out`."""
    mesh = init_mesh("cpu", 60.0)
    reports = {}
    for layout, case in jobs:
        setup = build(path, lay_out(mesh, layout), CASES[case])
        record = setup.update()
        reports[layout, case] = {
            **record,
            "submissions": setup.reward.calls,
            "decoded": sum(setup.decoded),
            "graphs": counters["stats"]["unique_graphs"],
        }
        if mesh.rank == 0:
            np.savez(out / f"{layout}-{case}.npz", **_arrays(setup.updater.gradient))
        if layout in SAVED and (layout, case) == next(job for job in jobs if job[0] == layout):
            _save(setup, out, layout)
    barrier(mesh)
    differences = {}
    for saved, layout in moves:
        setup = build(path, lay_out(mesh, layout), CASES["whole"])
        checkpoint = out / f"saved-{saved}" / "checkpoint-1"
        load_checkpoint(checkpoint, setup.policy, setup.updater.optimizer, setup.mesh)
        expected = np.load(out / f"state-{saved}.npz")
        found = _arrays(_state(setup))
        assert found.keys() == set(expected.files)
        differences[saved, layout] = [n for n in found if not np.array_equal(found[n], expected[n])]
    return reports, differences


def _save(setup: Setup, out: Path, layout: str) -> None:
    mesh = setup.mesh
    state = TrainState(1, 0, 1, 1, 0, mesh.world, None, {})
    save_checkpoint(out / f"saved-{layout}", state, setup.policy, setup.updater.optimizer, mesh, keep=0)
    values = _arrays(_state(setup))
    if mesh.rank == 0:
        np.savez(out / f"state-{layout}.npz", **values)


def _state(setup: Setup) -> dict[str, torch.Tensor]:
    """All weights and AdamW state, whole."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in setup.policy.named_parameters():
        state[name] = whole(parameter)
        for key, value in setup.updater.optimizer.state[parameter].items():
            state[f"{name}/{key}"] = whole(value)
    return state


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Trained:
    """Reports of every job on each rank of its launch, and differences of every move."""

    reports: dict[tuple[str, str], list[dict[str, Any]]]
    differences: dict[tuple[str, str], list[str]]
    out: Path

    def gradient(self, layout: str, case: str) -> dict[str, np.ndarray]:
        return dict(np.load(self.out / f"{layout}-{case}.npz"))


@pytest.fixture(scope="module")
def trained(tiny_a14b: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One launch for each number of ranks, and one that brings all checkpoints back to one rank."""
    out = tmp_path_factory.mktemp("layouts")
    reports: dict[tuple[str, str], list[dict[str, Any]]] = {}
    differences: dict[tuple[str, str], list[str]] = {}
    for world, jobs, moves in (
        (1, JOBS[1], []),
        (2, JOBS[2], MOVES[2]),
        (4, JOBS[4], MOVES[4]),
        (1, [], MOVES[1]),
    ):
        ranks = run_ranks(world, train_and_save, tiny_a14b, out, jobs, moves, timeout_s=600)
        for job in jobs:
            reports[job] = [reported[job] for reported, _ in ranks]
        for move in moves:
            differences[move] = [name for _, moved in ranks for name in moved[move]]
    return Trained(reports, differences, out)


@pytest.mark.parametrize(("layout", "case"), [job for world in (1, 2, 4) for job in JOBS[world]])
def test_an_update_is_that_of_one_rank(trained: Trained, layout: str, case: str) -> None:
    base = "lora" if case == "lora" else "whole"
    reference, gradient = trained.gradient("alone", base), trained.gradient(layout, case)
    if case == "low expert":
        reference = {name: array for name, array in reference.items() if name.startswith("transformer_2.")}
    assert gradient.keys() == reference.keys()
    for name, expected in reference.items():
        norm = np.linalg.norm(expected)
        assert norm > 0, name
        assert np.linalg.norm(gradient[name] - expected) <= 1e-5 * norm, name
    norm = np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in reference.values()))
    (alone,) = trained.reports["alone", base]
    for report in trained.reports[layout, case]:
        # Other chunks in replay than in the rollout are other batch shapes for the kernels.
        assert report["ratio_max_dev"] <= (1e-6 if case == "in waves" else 0)
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert report["policy_loss"] == pytest.approx(alone["policy_loss"], abs=1e-6)
        same = ("reward_mean", "reward_std", "advantage_abs_mean", "replayed_per_expert", "lr", "skipped")
        assert [report[key] for key in same] == [alone[key] for key in same]


def test_all_blocks_of_both_experts_share_one_graph_in_rollout_and_replay(trained: Trained) -> None:
    assert [report["graphs"] for report in trained.reports["tp2", "compiled"]] == [1, 1]
    assert trained.reports["fsdp2", "in waves"][0]["graphs"] == 0


def test_both_experts_are_trained_and_are_not_the_same(trained: Trained) -> None:
    gradient = trained.gradient("tp2 x fsdp2", "in waves")
    high = [name for name in gradient if name.startswith("transformer.")]
    assert len(high) * 2 == len(gradient)
    for name in high:
        other = gradient[name.replace("transformer.", "transformer_2.")]
        assert not np.allclose(gradient[name], other, rtol=1e-2), name


@pytest.mark.parametrize(("layout", "case"), [job for world in (1, 2, 4) for job in JOBS[world]])
def test_only_the_first_of_tensor_parallel_peers_decodes_and_submits(
    trained: Trained, layout: str, case: str
) -> None:
    tp = LAYOUTS[layout][2]
    for rank, report in enumerate(trained.reports[layout, case]):
        share = ROLLOUTS * tp // len(trained.reports[layout, case])
        assert report["decoded"] == (share if rank % tp == 0 else 0)
        assert (report["submissions"] > 0) == (rank % tp == 0)


@pytest.mark.parametrize(("saved", "layout"), [move for moves in MOVES.values() for move in moves])
def test_checkpoints_move_between_layouts_bit_for_bit(trained: Trained, saved: str, layout: str) -> None:
    assert trained.differences[saved, layout] == []
