"""One start of a run: from a loaded configuration to an exit status."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from wan_trainer.config import (
    LoadedConfig,
    contract_values,
    resolve,
    settle_device,
    topology_of,
)
from wan_trainer.distributed.collectives import (
    SharedUserError,
    differences_from_first,
    from_first_rank,
)
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.models.wan.base_lora_files import base_lora_identity
from wan_trainer.recording.manifest import latest_checkpoint, verify_checkpoint
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.recording.run_record import FinalCheckpoint, RunRecord
from wan_trainer.targets import make_importable
from wan_trainer.training.first_failure import clear_failure, first_failure, lost_peer
from wan_trainer.training.openings import try_openings, try_refl
from wan_trainer.training.reward_role import close_scoring, score_for_actors
from wan_trainer.training.run_lock import RunLock
from wan_trainer.training.session import train_on
from wan_trainer.training.start import Start, native_threads, shared_values
from wan_trainer.types import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_STOPPED,
    RunFailure,
    UserError,
)


def train(start: Start, *, allow_changed: Collection[str] = ()) -> int:
    """Run or continue the run of `start`, on the ranks torchrun started; return the exit status.

    Raises UserError for input the user can mend, RendezvousError when ranks are missing, and whatever ended
    the training. What rank 0 knows of the end is in run.json by then.
    """
    spec = start.spec
    if spec.device == "cpu":
        # OpenMP threads that wait for each other at barriers stall whole runs on a busy machine.
        torch.set_num_threads(native_threads(os.environ.get("OMP_NUM_THREADS", "")))
    topology = start.topology
    mesh = init_mesh(
        spec.device,
        spec.rendezvous_timeout_s,
        tp=topology.tp,
        dp_replicate=topology.dp_replicate,
        reward_ranks=topology.reward_ranks,
    )
    try:
        if mesh.scores:
            return score_for_actors(mesh, start)
        return _train(mesh, start, allow_changed)
    finally:
        dist.destroy_process_group()


def _train(mesh: Mesh, start: Start, allow_changed: Collection[str]) -> int:
    spec, status = start.spec, EXIT_FAILURE
    try:
        _compare_nodes(mesh, start)
        with ExitStack() as held:
            # The lock stays on rank 0; the others only learn whether it was free.
            from_first_rank(mesh, lambda: _lock(spec.output.output_dir, held))
            record = RunRecord(RunFiles(spec.output.output_dir).record)
            status = _recorded(mesh, start, record, allow_changed)
            return status
    except UserError:
        status = EXIT_BAD_INPUT
        raise
    finally:
        close_scoring(mesh, start.topology, status)


def plan_start(loaded: LoadedConfig) -> Start:
    """Resolve a configuration for the ranks that torchrun started.

    Raises UserError, the same on every rank of a machine.
    """
    nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // nproc
    cuda_available = torch.cuda.is_available()
    loaded = settle_device(loaded, cuda_available=cuda_available)
    config = loaded.config
    spec = resolve(config, cuda_available=cuda_available)
    make_importable(loaded.path.parent)
    problems = try_openings(spec) + try_refl(spec)
    if problems:
        raise UserError(*problems)
    topology = topology_of(config, nodes, nproc)
    contract = contract_values(config, topology.prompts)
    contract["model"] |= base_lora_identity(spec.model.path, spec.model.base_lora)
    return Start(loaded=loaded, spec=spec, topology=topology, contract=contract)


def _compare_nodes(mesh: Mesh, start: Start) -> None:
    """Refuse ranks that were started with another configuration, by key, before they hang or train apart.

    The launcher's roll call has said so already, without the minutes that ranks take to come up, and before
    a missing machine ends in a time-out. Ranks that torchrun or a scheduler starts directly have only this.
    """
    lines = differences_from_first(mesh, shared_values(start))
    if lines:
        raise SharedUserError(*(f"{line}: start every node with the same configuration" for line in lines))


def _lock(output_dir: Path, held: ExitStack) -> None:
    held.callback(RunLock(output_dir).release)
    clear_failure(output_dir)


def _recorded(mesh: Mesh, start: Start, record: RunRecord, allow_changed: Collection[str]) -> int:
    """`train_on`, with rank 0 writing into run.json how it ended.

    A rank that fails only because another one is gone raises RunFailure with the line of the first.
    """
    output_dir = start.spec.output.output_dir
    status, reason = EXIT_FAILURE, ""
    try:
        status = train_on(mesh, start, record, allow_changed)
        return status
    except UserError as error:
        status, reason = EXIT_BAD_INPUT, "; ".join(error.problems)
        if not isinstance(error, SharedUserError):
            # The others do not raise it: they will miss this rank.
            reason = first_failure(output_dir, mesh.rank, error)
        raise
    except BaseException as error:
        reason = first_failure(output_dir, mesh.rank, error)
        if lost_peer(error):
            raise RunFailure(reason) from error
        raise
    finally:
        if mesh.rank == 0:
            record.finish(status, reason, _final_checkpoint(output_dir, status))


def _final_checkpoint(output_dir: Path, status: int) -> FinalCheckpoint | None:
    checkpoint = latest_checkpoint(output_dir)
    if checkpoint is None or status not in (EXIT_DONE, EXIT_STOPPED):
        return None
    try:
        verify_checkpoint(checkpoint)
        verified = True
    except UserError:
        verified = False
    return FinalCheckpoint(checkpoint, int(checkpoint.name.rpartition("-")[2]), verified)
