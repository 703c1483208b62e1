"""Writing checkpoints behind training: it waits for a copy of its state, storage is a thread's business."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from wan_trainer.config.specs import Target
from wan_trainer.distributed.collectives import (
    SharedUserError,
    agree,
    gather_from_every_rank,
    on_every_rank,
)
from wan_trainer.distributed.mesh import COLLECTIVE_TIMEOUT, Mesh
from wan_trainer.models.wan.adapter_files import AdapterConfig, write_adapter
from wan_trainer.recording.clock import Clock
from wan_trainer.recording.manifest import (
    MANIFEST,
    NAME,
    FileEntry,
    checkpoints,
    hash_files,
    relative,
    write_synced,
)
from wan_trainer.training.checkpoint_state import TRAIN_STATE, TrainState, checkpoint_values
from wan_trainer.training.ema import Ema
from wan_trainer.training.role_state import write_roles
from wan_trainer.training.stored_state import ADAPTERS, STATE, StoredState
from wan_trainer.types import RunFailure, UserError, first_line

PARTIAL = ".partial-"
# The ranks of a write end it with a collective, so that they differ by its latency; a rank that stays behind
# for longer waits for one that failed.
_STRAGGLER_S = 60.0
# How long a failing run waits for a checkpoint that is nearly there.
_LEAVING_S = 20.0


@dataclass
class _Write:
    """One write under way on this rank."""

    state: TrainState
    thread: threading.Thread | None = None
    done: threading.Event = field(default_factory=threading.Event)
    path: Path | None = None
    error: BaseException | None = None


class CheckpointWriter:
    """Writes `checkpoint-<step>`, points `latest` at it and deletes all but the newest `keep` (0 keeps all).

    At most one write is under way; a second `start` waits for the first. Every method but `close` is a
    collective, called by all ranks at the same place. A checkpoint that cannot be written, for example
    because the disk is full, is a RunFailure on every rank at the next such call: the previous checkpoint
    stays as it is, and what was written of this one is deleted.

    adapters: PEFT's configuration by expert, of a run that trains adapters. roles: the parts beside the
    actor, by the configuration key that names them. clock: gets a `write` span.
    """

    def __init__(
        self,
        output_dir: Path,
        mesh: Mesh,
        *,
        keep: int,
        adapters: Mapping[str, AdapterConfig] | None = None,
        roles: Mapping[str, Target] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._output_dir = output_dir
        self._mesh = mesh
        self._keep = keep
        self._adapters = adapters or {}
        self._roles = roles or {}
        self._clock = clock
        # Its own group: collectives of two threads on one group would answer each other.
        group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        # Its buffers are kept from save to save: the first copy pays for the pages, the others do not.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=mesh.device.type == "cuda",
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._write: _Write | None = None

    def start(
        self, state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None = None
    ) -> None:
        """Copy everything to host memory and return; the rest happens while training goes on."""
        self.wait()
        values = self._stager.stage(checkpoint_values(model, optimizer, self._mesh, ema))
        write = _Write(state)
        # A daemon: an interpreter that ends by an error must not wait for a rank that is gone.
        write.thread = threading.Thread(
            target=self._run, args=(write, values), name="checkpoint writer", daemon=True
        )
        self._write = write
        write.thread.start()

    def poll(self) -> Path | None:
        """The checkpoint that was completed since the last call, if one was; does not wait for storage."""
        if self._write is None or not agree(self._mesh, self._write.done.is_set()):
            return None
        return self._collect(_STRAGGLER_S)

    def wait(self) -> Path | None:
        """Wait for the write under way; its checkpoint, None when there is none."""
        return None if self._write is None else self._collect(COLLECTIVE_TIMEOUT.total_seconds())

    def close(self) -> None:
        """Let go of buffers. After a failure elsewhere, a write under way gets a little time to complete."""
        if self._write is not None:
            self._write.done.wait(_LEAVING_S)
        self._stager.close()

    def _collect(self, timeout_s: float) -> Path:
        write, self._write = self._write, None
        assert write is not None
        ended = write.done.wait(timeout_s)
        if ended and write.error is None:
            assert write.path is not None
            return write.path
        reason = "another rank failed" if write.error is None else _reason(write.error, self._mesh.rank)
        raise RunFailure(
            f"checkpoint-{write.state.step} cannot be written to {self._output_dir} ({reason}): free some "
            "space or mend the storage, then start the same command again; it continues from the checkpoint "
            "before"
        ) from write.error

    def _run(self, write: _Write, values: dict[str, Any]) -> None:
        """The thread's work."""
        started = time.monotonic()
        try:
            if self._mesh.device.type == "cuda":
                torch.cuda.set_device(self._mesh.device)
            write.path = self._store(write.state, values)
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            write.error = error
            if self._mesh.rank == 0:
                clean_partials(self._output_dir)
        finally:
            if self._clock is not None:
                self._clock.add("write", write.state.step - 1, started, time.monotonic())
            write.done.set()

    def _store(self, state: TrainState, values: dict[str, Any]) -> Path:
        rank, name = self._mesh.rank, f"checkpoint-{state.step}"
        partial = self._output_dir / f"{PARTIAL}{name}"

        def prepare() -> None:
            if rank == 0:
                clean_partials(self._output_dir)
                partial.mkdir(parents=True)

        self._on_storage(prepare)
        save(values, checkpoint_id=partial / STATE, process_group=self._group)
        own = self._on_storage(lambda: hash_files(partial, partial.glob(f"{STATE}/__{rank}_*")))
        entries = gather_from_every_rank(self._mesh, own, self._group)

        def complete() -> None:
            if rank == 0:
                files = {path: entry for part in entries for path, entry in part.items()}
                write_roles(partial, self._roles, state.step)
                _complete(partial, state, files, self._adapters)
                _publish(partial, self._output_dir / name)
                _apply_retention(self._output_dir, self._keep)

        self._on_storage(complete)
        return self._output_dir / name

    def _on_storage[T](self, work: Callable[[], T]) -> T:
        """What `work()` returns here; SharedUserError on every rank when the file system fails one."""

        def attempt() -> T:
            try:
                return work()
            except (OSError, SafetensorError) as error:
                raise UserError(f"{error} on rank {self._mesh.rank}") from error

        return on_every_rank(self._mesh, attempt, self._group)


def clean_partials(output_dir: Path) -> None:
    """Delete what an interrupted save left behind."""
    for path in output_dir.glob(f"{PARTIAL}checkpoint-*"):
        if NAME.fullmatch(path.name.removeprefix(PARTIAL)):
            shutil.rmtree(path, ignore_errors=True)


def _complete(
    partial: Path, state: TrainState, files: dict[str, FileEntry], adapters: Mapping[str, AdapterConfig]
) -> None:
    """Add everything beside the shards, whose entries `files` has, and last the manifest."""
    write_synced(partial / TRAIN_STATE, json.dumps(asdict(state), indent=1) + "\n")
    _write_adapters(partial, adapters)
    rest = [path for path in partial.rglob("*") if path.is_file() and relative(partial, path) not in files]
    for path in rest:
        _sync(path)
    files = files | hash_files(partial, rest)
    manifest = {
        "format": 1,
        "step": state.step,
        "world": state.world,
        "files": {name: asdict(entry) for name, entry in files.items()},
    }
    write_synced(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def _write_adapters(partial: Path, configs: Mapping[str, AdapterConfig]) -> None:
    """Write `lora/<expert>/` in PEFT's layout from the shards."""
    if not configs:
        return
    stored = StoredState(partial)
    for expert, config in configs.items():
        names = stored.shapes("model", f"{expert}.")
        write_adapter(partial / ADAPTERS / expert, config, stored.read("model", names, f"{expert}."))


def _publish(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name, then let `latest` name it."""
    if final.exists():
        # A run that goes on from before it: it was damaged, or its run was told to start over.
        shutil.rmtree(final)
    partial.rename(final)
    temporary = final.parent / ".latest.tmp"
    write_synced(temporary, final.name + "\n")
    temporary.replace(final.parent / "latest")
    _sync(final.parent)


def _apply_retention(output_dir: Path, keep: int) -> None:
    # Directories without a manifest do not count: one with a high step would take the place of a whole one.
    for path in checkpoints(output_dir)[:-keep] if keep > 0 else []:
        # What is half deleted when the run is killed must not bear a checkpoint's name.
        doomed = path.with_name(f"{PARTIAL}{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have a file, or the names in a directory, on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException, rank: int) -> str:
    """Why a write failed, in one line."""
    if isinstance(error, CheckpointException):
        # Its text holds a traceback of every rank.
        first, (failure, _) = min(error.failures.items())
        return f"{type(failure).__name__} on rank {first}: {failure}"
    if isinstance(error, SharedUserError):
        return str(error)
    return f"{type(error).__name__} on rank {rank}: {first_line(error)}"
