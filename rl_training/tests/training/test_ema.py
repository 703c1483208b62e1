"""Averages of the trained weights: the closed form, on any number of ranks, through checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.test_optimizer import SPEC
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.recording.manifest import verify_checkpoint
from wan_trainer.training.checkpoint import TrainState, load_checkpoint, save_checkpoint
from wan_trainer.training.ema import Ema
from wan_trainer.training.optimizer import Updater, build_optimizer

DECAY = 0.7
# Update 2 has a gradient that is not a number: it must leave weights and averages as they are.
SPOILED = 2


def _full(tensor: torch.Tensor) -> list[float]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().flatten().tolist()


@dataclass
class _Parts:
    """A sharded network with a frozen bias, its updater and its averages."""

    network: torch.nn.Module
    updater: Updater
    ema: Ema

    @classmethod
    def build(cls, mesh: Mesh) -> _Parts:
        torch.manual_seed(7)
        network = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        network[0].bias.requires_grad_(False)
        fully_shard(network, mesh=mesh.device_mesh["dp_replicate", "dp_shard"])
        trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        ema = Ema(trained, DECAY)
        optimizer = build_optimizer((parameter for _, parameter in trained), SPEC)
        return cls(network, Updater(optimizer, SPEC, horizon=10, ema=ema), ema)

    def update(self, number: int) -> dict[str, list[float]]:
        """One update; the trained weights after it."""
        scale = math.nan if number == SPOILED else 1.0
        inputs = torch.linspace(-1, 1, 12).view(2, 6) * (number + 1)
        (self.network(inputs).square().sum() * scale).backward()
        assert self.updater.step().skipped == (number == SPOILED)
        return self.weights()

    def weights(self) -> dict[str, list[float]]:
        return {name: _full(p) for name, p in self.network.named_parameters() if p.requires_grad}

    def averages(self) -> dict[str, list[float]]:
        return {name: _full(average) for name, average in self.ema.averages.items()}


def _average(out: str) -> dict[str, Any]:
    """Five updates with a checkpoint after the third, and one of a run without averages."""
    mesh = init_mesh("cpu", 60)
    parts = _Parts.build(mesh)
    history, averages = [parts.weights()], [parts.averages()]
    for number in range(5):
        history.append(parts.update(number))
        averages.append(parts.averages())
        if number == 2:
            for name, ema in (("with", parts.ema), ("without", None)):
                state = TrainState(3, 0, 3, 2, 1, mesh.world, None, {})
                optimizer = parts.updater.optimizer
                save_checkpoint(Path(out) / name, state, parts.network, optimizer, mesh, keep=0, ema=ema)
    dtypes = {str(average.dtype) for average in parts.ema.averages.values()}
    sharded = [average.to_local().numel() for average in parts.ema.averages.values()]  # pyright: ignore
    return {"weights": history, "averages": averages, "dtypes": dtypes, "local": sharded}


def _restore(out: str) -> dict[str, Any]:
    """Both checkpoints in fresh parts; the one with averages goes on to the end."""
    mesh = init_mesh("cpu", 60)
    seen: dict[str, Any] = {}
    for name in ("without", "with"):
        parts = _Parts.build(mesh)
        checkpoint = Path(out) / name / "checkpoint-3"
        verify_checkpoint(checkpoint)
        load_checkpoint(checkpoint, parts.network, parts.updater.optimizer, mesh, ema=parts.ema)
        parts.updater.updates = 3
        seen[name] = (parts.weights(), parts.averages())
    for number in (3, 4):
        parts.update(number)
    seen["end"] = (parts.weights(), parts.averages())
    # A run that keeps no averages reads a checkpoint that has them.
    load_checkpoint(checkpoint, parts.network, parts.updater.optimizer, mesh)
    seen["unread"] = (parts.weights(), parts.averages())
    return seen


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
def test_averages_follow_the_closed_form_and_continue_bit_for_bit_at_any_world_size(
    tmp_path: Path, saving: int, loading: int
) -> None:
    ranks = run_ranks(saving, _average, str(tmp_path))
    first = ranks[0]
    assert all(seen["averages"] == first["averages"] for seen in ranks)
    assert first["dtypes"] == {"torch.float32"}
    totals = [sum(sizes) for sizes in zip(*(seen["local"] for seen in ranks), strict=True)]
    assert totals == [len(values) for values in first["weights"][0].values()], "each value on one rank"

    assert set(first["averages"][0]) == {"0.weight", "2.weight", "2.bias"}, "the frozen bias has none"
    assert first["averages"][0] == first["weights"][0]
    assert first["averages"][SPOILED + 1] == first["averages"][SPOILED]
    applied = [weights for number, weights in enumerate(first["weights"]) if number != SPOILED + 1]
    for name, values in first["averages"][-1].items():
        history = torch.tensor([weights[name] for weights in applied], dtype=torch.float64)
        n = len(history) - 1
        expected = DECAY**n * history[0]
        for i in range(1, n + 1):
            expected = expected + (1 - DECAY) * DECAY ** (n - i) * history[i]
        difference = torch.tensor(values, dtype=torch.float64) - expected
        assert difference.norm() <= 1e-6 * expected.norm(), name
        assert (expected - history[-1]).norm() > 1e-3 * expected.norm(), "it lags behind the weights"

    for seen in run_ranks(loading, _restore, str(tmp_path)):
        assert seen["with"] == (first["weights"][3], first["averages"][3])
        assert seen["end"] == (first["weights"][5], first["averages"][5])
        assert seen["without"] == (first["weights"][3], first["weights"][3]), "it starts at the weights"
        assert seen["unread"] == (first["weights"][3], first["averages"][5])


def test_a_restart_forgets_the_past() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    ema = Ema([("weight", weight)], 0.5)
    with torch.no_grad():
        weight.fill_(3.0)
    ema.update()
    assert ema.averages["weight"].tolist() == [2.0] * 3
    ema.restart()
    assert ema.averages["weight"].tolist() == [3.0] * 3
    assert ema.averages["weight"] is not weight and not ema.averages["weight"].requires_grad
