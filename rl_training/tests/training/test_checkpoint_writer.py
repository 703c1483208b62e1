"""Checkpoints written behind training: what they hold, how they fail, and what a run makes of that."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import fully_shard

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import MeanColour, rows, run, tiny_recipe, write_recipe
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.recording.manifest import MANIFEST, checkpoints, verify_checkpoint
from wan_trainer.training import checkpoint_writer
from wan_trainer.training.checkpoint import CheckpointWriter, TrainState
from wan_trainer.training.stored_state import StoredState
from wan_trainer.types import EXIT_DONE, RunFailure

_save = checkpoint_writer.save
_write_data = FileSystemWriter.write_data


class _Gate:
    """Storage that stands still until it is opened, and may be full then."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.full = False
        checkpoint_writer.save = self._save

        def write_data(writer: FileSystemWriter, *arguments: Any) -> Any:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return _write_data(writer, *arguments)

        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]

    def _save(self, *arguments: Any, **options: Any) -> Any:
        assert self.open.wait(60)
        return _save(*arguments, **options)


def _network(mesh: Mesh) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    fully_shard(network, mesh=mesh.device_mesh["dp_replicate", "dp_shard"])
    return network, torch.optim.AdamW(network.parameters(), lr=0.1)


def _train(network: torch.nn.Module, optimizer: torch.optim.AdamW) -> None:
    network(torch.linspace(-1, 1, 12).view(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.rand(1)


def _whole(network: torch.nn.Module, optimizer: torch.optim.AdamW) -> dict[str, list[float]]:
    """Weights and moments, by the names they have in a checkpoint."""
    values: dict[str, list[float]] = {}
    for name, parameter in network.named_parameters():
        values[f"model.{name}"] = parameter.full_tensor().flatten().tolist()  # type: ignore[attr-defined]
        for key in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][key].full_tensor()
            values[f"optimizer.state.{name}.{key}"] = moment.flatten().tolist()
    return values


def _writer_at_work(out: Path) -> dict[str, Any]:
    """One rank's view of saves 1 to 4, of which storage fails the third, on rank 1."""
    mesh = init_mesh("cpu", 60)
    network, optimizer = _network(mesh)
    writer = CheckpointWriter(out, mesh, keep=1)
    gate = _Gate()
    seen: dict[str, Any] = {}

    def start(step: int) -> None:
        _train(network, optimizer)
        writer.start(TrainState(step, 0, step, step, 1, mesh.world, None, {}), network, optimizer)

    def poll() -> Path | None:
        for _ in range(600):
            path = writer.poll()
            if path is not None:
                return path
            time.sleep(0.05)
        return None

    start(1)
    for _ in range(3):
        _train(network, optimizer)
    seen["before storage answers"] = writer.poll()
    # The second waits for the first, whichever of them storage holds up.
    threading.Timer(0.5, gate.open.set).start()
    start(2)
    seen["at the second start"] = [path.name for path in checkpoints(out)][:1]
    _train(network, optimizer)
    seen["second"] = poll()
    seen["nothing under way"] = (writer.poll(), writer.wait())
    gate.full = mesh.rank == 1
    start(3)
    try:
        seen["third"] = poll()
    except RunFailure as failure:
        seen["third"] = str(failure)
    seen["left"] = sorted(path.name for path in out.iterdir())
    gate.full = False
    start(4)
    seen["fourth"] = writer.wait()
    writer.close()
    return seen


def test_a_checkpoint_is_that_of_its_step_and_a_failure_comes_to_all_ranks(tmp_path: Path) -> None:
    # Left by a copy that was broken off: it must not take the place of a whole one.
    (tmp_path / "checkpoint-9" / "state").mkdir(parents=True)
    ranks = run_ranks(2, _writer_at_work, tmp_path)
    for seen in ranks:
        assert seen["before storage answers"] is None
        assert seen["at the second start"] == ["checkpoint-1"]
        assert seen["second"] == tmp_path / "checkpoint-2"
        assert seen["nothing under way"] == (None, None)
        assert seen["third"] == (
            f"checkpoint-3 cannot be written to {tmp_path} (OSError on rank 1: [Errno 28] No space left on "
            "device): free some space or mend the storage, then start the same command again; it continues "
            "from the checkpoint before"
        )
        assert set(seen["left"]) - {".partial-checkpoint-3"} == {"checkpoint-2", "checkpoint-9", "latest"}, (
            seen
        )
        assert seen["fourth"] == tmp_path / "checkpoint-4"
    # keep=1: the one before goes when the next is there.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-9", "latest"]
    assert verify_checkpoint(tmp_path / "checkpoint-4").step == 4


def _held_up(out: Path) -> list[Any]:
    """What a checkpoint is to hold, while training goes on before its bytes are written."""
    mesh = init_mesh("cpu", 60)
    network, optimizer = _network(mesh)
    gate = _Gate()
    writer = CheckpointWriter(out, mesh, keep=0)
    expected = []
    # Twice: the second copy goes into the buffers of the first.
    for step in (1, 2):
        gate.open.clear()
        _train(network, optimizer)
        expected.append((_whole(network, optimizer), torch.get_rng_state().tolist()))
        writer.start(TrainState(step, 0, step, step, 1, mesh.world, None, {}), network, optimizer)
        for _ in range(3):
            _train(network, optimizer)
        gate.open.set()
        writer.wait()
    writer.close()
    return expected


def test_updates_meanwhile_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    ranks = run_ranks(2, _held_up, tmp_path)
    for step in (1, 2):
        stored = StoredState(tmp_path / f"checkpoint-{step}")
        values, _ = ranks[0][step - 1]
        for name, expected in values.items():
            section, _, rest = name.partition(".")
            assert stored.read(section, [rest])[rest].flatten().tolist() == expected, (step, name)
        rng = stored.read("rng", ["rank0", "rank1"])
        assert [rng[f"rank{rank}"].tolist() for rank in range(2)] == [seen[step - 1][1] for seen in ranks]
    assert ranks[0][0][0] != ranks[0][1][0]


def _lost_rank(out: Path) -> str:
    """A defect of rank 0 alone, in the part that the others wait for."""
    mesh = init_mesh("cpu", 60)
    network, optimizer = _network(mesh)
    checkpoint_writer._STRAGGLER_S = 0.5
    checkpoint_writer._LEAVING_S = 0.5

    def defect(*_arguments: Any) -> None:
        raise RuntimeError("a defect")

    checkpoint_writer._complete = defect
    writer = CheckpointWriter(out, mesh, keep=0)
    _train(network, optimizer)
    try:
        writer.start(TrainState(1, 0, 1, 1, 1, mesh.world, None, {}), network, optimizer)
        for _ in range(100):
            assert writer.poll() is None
            time.sleep(0.05)
    except RunFailure as failure:
        return str(failure)
    finally:
        writer.close()
    return "no failure"


def test_a_rank_whose_write_broke_off_does_not_hold_up_the_others(tmp_path: Path) -> None:
    first, second = run_ranks(2, _lost_rank, tmp_path, timeout_s=60)
    assert "checkpoint-1 cannot be written" in first and "(RuntimeError on rank 0: a defect)" in first
    # The reason is rank 0's; here it is only that rank 0 is late, or gone.
    assert "checkpoint-1 cannot be written" in second and "\n" not in second
    assert list(tmp_path.iterdir()) == []


def _full_disk_in_a_run(recipe: str, out: Path) -> list[Any]:
    """Statuses of a run whose disk is full at its second save, of the same command afterwards, without the
    newest manifest, and without any checkpoint."""
    saves: list[Any] = []

    def full(*arguments: Any, **options: Any) -> Any:
        saves.append(arguments)
        if len(saves) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return _save(*arguments, **options)

    checkpoint_writer.save = full
    outcomes: list[Any] = []
    for _ in range(3):
        try:
            outcomes.append(run(recipe, [], MeanColour()))
        except RunFailure as failure:
            outcomes.append(str(failure))
    assert [path.name for path in checkpoints(out)] == [f"checkpoint-{step}" for step in (1, 2, 3)]
    # A manifest that is gone makes the one before the newest; without any, nothing is started over.
    (out / "checkpoint-3" / MANIFEST).unlink()
    outcomes.append(run(recipe, [], MeanColour()))
    assert verify_checkpoint(out / "checkpoint-3").step == 3
    for path in checkpoints(out):
        shutil.rmtree(path)
    outcomes.append(run(recipe, [], MeanColour()))
    return outcomes


def test_a_run_on_a_full_disk_ends_and_the_same_command_goes_on(
    tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> None:
    out = tmp_path / "run"
    values = tiny_recipe(out, tiny_ti2v, tiny_dataset, *tiny_evalkit) | {
        "max_steps": 3,
        "save_steps": 1,
        "keep_checkpoints": 0,
        "lr_scheduler": "constant",
    }
    recipe = str(write_recipe(tmp_path / "recipe.yaml", values))
    ((failed, done, complete, again, (line,)),) = run_ranks(1, _full_disk_in_a_run, recipe, out)
    assert "checkpoint-2 cannot be written" in failed and "No space left" in failed and "\n" not in failed
    assert (done, complete, again) == (EXIT_DONE, EXIT_DONE, EXIT_DONE)
    assert "holds a run without a complete checkpoint (checkpoint-3 is gone" in line
    starts = json.loads((out / "run.json").read_text())["starts"]
    assert "No space left on device" in starts[0]["reason"], starts[0]
    # The second start went on behind the first checkpoint, and the third found nothing to do.
    assert [row["batch"] for row in rows(out, "metrics.jsonl")] == [0, 1, 2]
    for name in ("rewards.jsonl", "timeline.jsonl"):
        assert {row["step"] for row in rows(out, name)} == {0, 1, 2}
    written = rows(out, "rewards.jsonl")
    assert len(written) == len({(row["step"], row["prompt"], row["member"]) for row in written}) == 12
