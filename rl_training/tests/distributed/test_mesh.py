"""Rendezvous, mesh axes and collectives on real gloo ranks."""

from __future__ import annotations

import os

import pytest
import torch

from rl_training.tests.ranks import free_port, run_ranks
from wan_trainer.distributed.collectives import agree, all_reduce, differences_from_first, gather_objects
from wan_trainer.distributed.mesh import AXES, RendezvousError, init_mesh
from wan_trainer.types import UserError


def _collectives() -> dict[str, object]:
    mesh = init_mesh("cpu", 30)
    number = torch.tensor([float(mesh.rank + 1)])
    return {
        "axes": mesh.device_mesh.mesh_dim_names,
        "shape": tuple(mesh.device_mesh.shape),
        "gathered": gather_objects(mesh, {"rank": mesh.rank}),
        "sum": all_reduce(mesh, number, "sum").item(),
        "max": all_reduce(mesh, number, "max").item(),
        "untouched": number.item(),
        "agree_one": agree(mesh, mesh.rank == mesh.world - 1),
        "agree_none": agree(mesh, False),
        "differences": differences_from_first(mesh, {"seed": "1", "eta": str(mesh.rank // 2)}),
    }


def test_two_ranks_share_collectives() -> None:
    for rank, seen in enumerate(run_ranks(2, _collectives)):
        assert seen["axes"] == AXES
        assert seen["shape"] == (1, 2, 1)
        assert seen["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert (seen["sum"], seen["max"], seen["untouched"]) == (3.0, 2.0, rank + 1.0)
        assert (seen["agree_one"], seen["agree_none"]) == (True, False)
        assert seen["differences"] == []


def _three_runs() -> list[list[int]]:
    gathered = []
    for _ in range(3):
        mesh = init_mesh("cpu", 30)
        gathered.append(gather_objects(mesh, mesh.rank))
        torch.distributed.destroy_process_group()
    return gathered


def test_a_process_can_join_run_after_run() -> None:
    assert run_ranks(2, _three_runs, timeout_s=60) == [[[0, 1]] * 3] * 2


def _differing_config() -> list[str]:
    mesh = init_mesh("cpu", 30)
    return differences_from_first(mesh, {"learning_rate": "1e-05" if mesh.rank else "5e-06", "seed": "42"})


def test_a_differing_value_is_named_by_key_and_node_on_every_rank() -> None:
    first, second = run_ranks(2, _differing_config)
    assert first == second
    (line,) = first
    assert line.startswith("learning_rate: rank 1 on ")
    assert "1e-05" in line and "5e-06" in line and "rank 0" in line


def _hsdp_axes() -> tuple[tuple[int, ...], int, int]:
    mesh = init_mesh("cpu", 30, dp_replicate=2)
    return tuple(mesh.device_mesh.shape), mesh.dp_rank, mesh.dp_size


def test_hsdp_has_a_replicate_axis() -> None:
    assert run_ranks(2, _hsdp_axes) == [((2, 1, 1), 0, 2), ((2, 1, 1), 1, 2)]


def test_one_process_needs_no_rendezvous() -> None:
    ((seen),) = run_ranks(1, _collectives)
    assert seen["shape"] == (1, 1, 1)
    assert seen["gathered"] == [{"rank": 0}]


def _missing_peers() -> list[str]:
    """What rank 0 says that waits for rank 1, and what rank 1 says that waits for rank 0."""
    said = []
    for rank in ("0", "1"):
        os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
        with pytest.raises(RendezvousError) as missed:
            init_mesh("cpu", 2.0)
        said.append(str(missed.value))
    return said


def test_a_missing_rank_is_named_within_the_time_out() -> None:
    ((of_first, of_second),) = run_ranks(1, _missing_peers, timeout_s=30)
    assert "[1] of 2" in of_first and "--rendezvous_timeout_s" in of_first
    assert "could not reach the rendezvous at 127.0.0.1:" in of_second and "MASTER_ADDR" in of_second
    assert "\n" not in of_first + of_second


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "x"}, "RANK is 'x', a number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "RANK is 0, outside"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"RANK": "1"}, "RANK is 1, outside 0..0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "is 2 and MASTER_PORT not set",
        ),
    ],
)
def test_an_environment_that_describes_no_rank_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        init_mesh("cpu", 5)
    (line,) = refused.value.problems
    assert words in line and "unset WORLD_SIZE and RANK" in line
