"""Checkpoints: atomic, verified, resharded by name."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_training.tests.ranks import run_ranks
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.recording.manifest import latest_checkpoint, verify_checkpoint
from wan_trainer.training.checkpoint import TrainState, load_checkpoint, read_train_state, save_checkpoint
from wan_trainer.training.checkpoint_writer import clean_partials
from wan_trainer.training.resume import find_resume_point
from wan_trainer.types import RunFailure, UserError

CONTRACT = {"data": {"seed": "1"}, "optimization": {"learning_rate": "0.1"}}


def _state(step: int, world: int) -> TrainState:
    return TrainState(step, 0, step, step, 1, world, "wandb-1", CONTRACT)


def _network(mesh: Mesh) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    network[0].bias.requires_grad_(False)
    fully_shard(network, mesh=mesh.device_mesh["dp_replicate", "dp_shard"])
    return network, torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.1)


def _train(network: torch.nn.Module, optimizer: torch.optim.AdamW, steps: int) -> None:
    for step in range(steps):
        network(torch.linspace(-1, 1, 12).view(2, 6) * (step + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _weights(network: torch.nn.Module) -> list[list[float]]:
    parameters = [parameter for parameter in network.parameters() if isinstance(parameter, DTensor)]
    return [parameter.full_tensor().flatten().tolist() for parameter in parameters]


def _save(out: str, steps: list[int], keep: int = 0) -> list[list[float]]:
    mesh = init_mesh("cpu", 60)
    network, optimizer = _network(mesh)
    done = 0
    for step in steps:
        _train(network, optimizer, step - done)
        done = step
        save_checkpoint(Path(out), _state(step, mesh.world), network, optimizer, mesh, keep=keep)
    _train(network, optimizer, 2)
    return _weights(network)


def _load_and_continue(checkpoint: str) -> list[list[float]]:
    mesh = init_mesh("cpu", 60)
    network, optimizer = _network(mesh)
    verify_checkpoint(Path(checkpoint))
    load_checkpoint(Path(checkpoint), network, optimizer, mesh)
    _train(network, optimizer, 2)
    return _weights(network)


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_two_ranks_continues_bit_for_bit_at_any_world_size(
    tmp_path: Path, world: int
) -> None:
    uninterrupted = run_ranks(2, _save, str(tmp_path), [3])[0]
    resumed = run_ranks(world, _load_and_continue, str(tmp_path / "checkpoint-3"))[0]
    assert resumed == uninterrupted


def _continue_with_the_other_expert(out: str, resume: bool) -> list[list[float]]:
    """Save after updates of one expert only, or continue from there; then train the other one."""
    mesh = init_mesh("cpu", 60)
    torch.manual_seed(7)
    experts = torch.nn.ModuleDict({"high": torch.nn.Linear(6, 5), "low": torch.nn.Linear(6, 5)})
    for expert in experts.values():
        fully_shard(expert, mesh=mesh.device_mesh["dp_replicate", "dp_shard"])
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1)
    if resume:
        load_checkpoint(Path(out) / "checkpoint-2", experts, optimizer, mesh)
    else:
        _train(experts["high"], optimizer, 2)
        save_checkpoint(Path(out), _state(2, mesh.world), experts, optimizer, mesh, keep=0)
    _train(experts["low"], optimizer, 2)
    _train(experts["high"], optimizer, 1)
    return _weights(experts)


def test_an_expert_that_had_no_update_yet_continues_bit_for_bit(tmp_path: Path) -> None:
    uninterrupted = run_ranks(1, _continue_with_the_other_expert, str(tmp_path), False)[0]
    resumed = run_ranks(1, _continue_with_the_other_expert, str(tmp_path), True)[0]
    assert resumed == uninterrupted


def _load_into_another_shape(checkpoint: str) -> str:
    mesh = init_mesh("cpu", 60)
    network = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    network[0].bias.requires_grad_(False)
    fully_shard(network, mesh=mesh.device_mesh["dp_replicate", "dp_shard"])
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.1)
    try:
        load_checkpoint(Path(checkpoint), network, optimizer, mesh)
    except UserError as error:
        return str(error)
    return "loaded"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `saved` is a copy of."""
    out = tmp_path_factory.mktemp("saved")
    run_ranks(1, _save, str(out), [1, 2, 3], 2)
    return out


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    """An output directory with checkpoints 1, 2 and 3, of which retention kept 2 and 3."""
    return Path(shutil.copytree(written, tmp_path / "saved"))


def test_retention_latest_and_state(saved: Path) -> None:
    assert sorted(path.name for path in saved.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    assert (saved / "latest").read_text().strip() == "checkpoint-3"
    assert not list(saved.glob(".partial*"))
    assert latest_checkpoint(saved) == saved / "checkpoint-3"
    assert read_train_state(saved / "checkpoint-3") == _state(3, 1)
    manifest = json.loads((saved / "checkpoint-3" / "manifest.json").read_text())
    assert manifest["step"] == 3
    assert "state/.metadata" in manifest["files"] and "train_state.json" in manifest["files"]


def test_an_interrupted_save_is_ignored_and_cleaned(saved: Path) -> None:
    (saved / ".partial-checkpoint-9" / "state").mkdir(parents=True)
    (saved / "checkpoint-8").mkdir()
    assert latest_checkpoint(saved) == saved / "checkpoint-3"
    clean_partials(saved)
    assert not (saved / ".partial-checkpoint-9").exists()


def _damage(checkpoint: Path, how: str) -> None:
    shard = next((checkpoint / "state").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    if how == "flipped byte":
        content[len(content) // 2] ^= 1
        shard.write_bytes(bytes(content))
    elif how == "truncated":
        shard.write_bytes(bytes(content[:-10]))
    elif how == "missing file":
        shard.unlink()
    elif how == "older metadata":
        older = checkpoint.parent / "checkpoint-2" / "state" / ".metadata"
        shutil.copyfile(older, checkpoint / "state" / ".metadata")
    elif how == "foreign file":
        (checkpoint / "state" / "extra.bin").write_bytes(b"x")
    elif how == "other manifest":
        (checkpoint / "manifest.json").write_bytes(
            (checkpoint.parent / "checkpoint-2" / "manifest.json").read_bytes()
        )
    else:
        (checkpoint / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("flipped byte", "sha256"),
        ("truncated", "bytes, the manifest says"),
        ("missing file", "missing; delete this checkpoint"),
        ("older metadata", r"\.metadata: "),
        ("foreign file", "not in the manifest"),
        ("other manifest", "the manifest is of step 2"),
        ("torn manifest", "incomplete"),
    ],
)
def test_damage_is_refused_by_name(saved: Path, how: str, says: str) -> None:
    verify_checkpoint(saved / "checkpoint-3")
    _damage(saved / "checkpoint-3", how)
    with pytest.raises(UserError, match=says) as refused:
        find_resume_point(saved, CONTRACT, auto_resume=True)
    assert all("\n" not in line and str(saved / "checkpoint-3") in line for line in refused.value.problems)
    shutil.rmtree(saved / "checkpoint-3")
    point = find_resume_point(saved, CONTRACT, auto_resume=True)
    assert point is not None and point.state.step == 2, "deleting it is the remedy that each line names"


def test_a_manifest_that_is_gone_makes_the_checkpoint_before_the_newest(saved: Path) -> None:
    (saved / "checkpoint-3" / "manifest.json").unlink()
    point = find_resume_point(saved, CONTRACT, auto_resume=True)
    assert point is not None and point.state.step == 2
    (note,) = point.notes
    assert note.startswith("warning: checkpoint-3 has no manifest.json")
    (saved / "checkpoint-2" / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds a run without a complete checkpoint") as refused:
        find_resume_point(saved, CONTRACT, auto_resume=True)
    (line,) = refused.value.problems
    assert "delete checkpoint-2 and checkpoint-3 and latest there to start over" in line


def test_resume_refuses_a_changed_contract_by_key(saved: Path) -> None:
    point = find_resume_point(saved, CONTRACT, auto_resume=True)
    assert point is not None and point.state.step == 3
    changed = {"data": {"seed": "2"}, "optimization": {"learning_rate": "0.2"}}
    with pytest.raises(UserError) as refused:
        find_resume_point(saved, changed, auto_resume=True, allow_changed=["learning_rate"])
    (line,) = refused.value.problems
    assert line.startswith('seed: "2" differs from "1" of the run to go on from (data)')
    assert "--allow_changed seed" in line
    assert (
        find_resume_point(saved, changed, auto_resume=True, allow_changed=["learning_rate", "seed"])
        is not None
    )


def test_a_used_output_dir_without_auto_resume_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="auto_resume is false"):
        find_resume_point(saved, CONTRACT, auto_resume=False)
    assert find_resume_point(tmp_path / "empty", CONTRACT, auto_resume=False) is None


def _save_where_a_rank_cannot_write(out: str, failing: int) -> str:
    mesh = init_mesh("cpu", 60)
    network, optimizer = _network(mesh)
    save_checkpoint(Path(out), _state(1, mesh.world), network, optimizer, mesh, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        save_checkpoint(Path(out), _state(2, mesh.world), network, optimizer, mesh, keep=1)
    except RunFailure as failure:
        return str(failure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


@pytest.mark.parametrize("failing", [0, 1])
def test_storage_that_fails_one_rank_ends_all_in_one_line_and_keeps_the_checkpoint_before(
    tmp_path: Path, failing: int
) -> None:
    lines = run_ranks(2, _save_where_a_rank_cannot_write, str(tmp_path), failing)
    for line in lines:
        assert "checkpoint-2 cannot be written" in line and "File too large" in line, line
        assert "Traceback" not in line and "\n" not in line, line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "latest"]
    verify_checkpoint(tmp_path / "checkpoint-1")


def test_the_part_after_the_shards_may_fail_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").write_text("a file where the directory goes")
    line = run_ranks(2, _expect_failure, str(tmp_path))
    assert line[0] == line[1] and "checkpoint-2 cannot be written" in line[0], line


def _expect_failure(out: str) -> str:
    with pytest.raises(RunFailure) as failure:
        _save(out, [2])
    return str(failure.value)


def test_a_checkpoint_of_another_shape_is_one_line(saved: Path) -> None:
    (line,) = run_ranks(1, _load_into_another_shape, str(saved / "checkpoint-3"))
    assert "2 trained parameters are not in this checkpoint" in line and "0.weight" in line
