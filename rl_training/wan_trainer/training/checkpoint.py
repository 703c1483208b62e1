"""Checkpoints: distributed save by parameter name, atomic, checksummed, verified before use.

    <output_dir>/checkpoint-<step>/state/            torch.distributed.checkpoint files: model, optimizer,
                                                     rng, and ema when averages are kept
                                   train_state.json  position and identity of the run
                                   manifest.json     written last: size and sha256 of every other file
    <output_dir>/latest                              the name of the newest complete checkpoint

A checkpoint is written under a temporary name and renamed once its manifest is on disk, so a directory called
`checkpoint-<step>` is complete or was damaged later, which `verify` finds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from wan_trainer.algorithms.base import RunFailure
from wan_trainer.distributed.collectives import SharedUserError, gather_from_every_rank, on_every_rank
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.training.ema import Ema
from wan_trainer.types import UserError

_NAME = re.compile(r"checkpoint-(\d+)")
_PARTIAL = re.compile(r"\.partial-checkpoint-(\d+)")
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True)
class TrainState:
    """Where the run stands: batches trained (the position in the data), optimizer updates, policy version.

    contract: the config values, per group, that a resumed run must not change. wandb_id: None when not
    tracked.
    """

    step: int
    epoch: int
    updates: int
    policy_version: int
    seed: int
    world: int
    wandb_id: str | None
    contract: Mapping[str, Mapping[str, Any]]


def save_checkpoint(
    output_dir: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    *,
    keep: int,
    ema: Ema | None = None,
) -> Path:
    """Write `checkpoint-<step>`, point `latest` at it and delete all but the newest `keep` (0 keeps all).

    Collective. Raises RunFailure on every rank when it cannot be written, for example because the disk is
    full: the previous checkpoint stays as it is, and what was written of this one is deleted.
    """
    try:
        return _write_checkpoint(output_dir, state, model, optimizer, mesh, keep, ema)
    except (SharedUserError, CheckpointException) as error:
        if mesh.rank == 0:
            clean_partials(output_dir)
        reason = str(error)
        if isinstance(error, CheckpointException):
            # Its text holds a traceback of every rank.
            rank, (failure, _) = min(error.failures.items())
            reason = f"{type(failure).__name__} on rank {rank}: {failure}"
        raise RunFailure(
            f"checkpoint-{state.step} cannot be written to {output_dir} ({reason}): free some space or mend "
            "the storage, then start the same command again; it continues from the checkpoint before"
        ) from error


def _write_checkpoint(
    output_dir: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    keep: int,
    ema: Ema | None,
) -> Path:
    final = output_dir / f"checkpoint-{state.step}"
    partial = output_dir / f".partial-checkpoint-{state.step}"

    def prepare() -> None:
        if mesh.rank == 0:
            clean_partials(output_dir)
            partial.mkdir(parents=True)

    _on_storage(mesh, prepare)
    save(_values(model, optimizer, mesh, ema), checkpoint_id=partial / "state")
    own = _on_storage(mesh, lambda: _hash_files(partial, partial.glob(f"state/__{mesh.rank}_*")))
    entries = gather_from_every_rank(mesh, own)

    def complete() -> None:
        if mesh.rank != 0:
            return
        (partial / "train_state.json").write_text(json.dumps(asdict(state), indent=1) + "\n")
        files = {name: entry for part in entries for name, entry in part.items()}
        rest = [
            path for path in partial.rglob("*") if path.is_file() and _relative(partial, path) not in files
        ]
        files.update(_hash_files(partial, rest))
        manifest = {"format": 1, "step": state.step, "world": state.world, "files": files}
        _write_synced(partial / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _write_synced(output_dir / ".latest.tmp", final.name + "\n")
        (output_dir / ".latest.tmp").replace(output_dir / "latest")
        _apply_retention(output_dir, keep)

    _on_storage(mesh, complete)
    return final


def _on_storage[T](mesh: Mesh, work: Callable[[], T]) -> T:
    """What `work()` returns here; SharedUserError on every rank when the file system fails one of them."""

    def attempt() -> T:
        try:
            return work()
        except OSError as error:
            raise UserError(f"{error} on rank {mesh.rank}") from error

    return on_every_rank(mesh, attempt)


def _values(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, ema: Ema | None
) -> dict[str, Any]:
    """What a checkpoint stores, by section: tensors to write, or to read into."""
    values: dict[str, Any] = {
        "model": get_model_state_dict(model, options=_OPTIONS),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_OPTIONS),
        # One key per rank: values under one shared key are deduplicated and every rank would load rank 0's.
        "rng": {f"rank{mesh.rank}": torch.get_rng_state()},
    }
    if ema is not None:
        values["ema"] = dict(ema.averages)
    return values


def load_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    *,
    ema: Ema | None = None,
) -> None:
    """Restore the weights, optimizer, `ema` and this rank's RNG, at any number of ranks.

    A checkpoint without averages, of a run that kept none, starts `ema` at the restored weights. Collective;
    verify first. Raises SharedUserError when it does not hold all that is trained.
    """
    reader = FileSystemReader(checkpoint / "state")
    values = _values(model, optimizer, mesh, ema)
    stored = reader.read_metadata().state_dict_metadata
    missing = sorted(
        f"model.{name}"
        for name, value in values["model"].items()
        if getattr(stored.get(f"model.{name}"), "size", None) != value.shape
    )
    if missing:
        raise SharedUserError(
            f"{checkpoint}: {len(missing)} trained parameters are not in this checkpoint, or not as large "
            f"(first: {missing[0]}): it was written by another model or LoRA setting; use another output_dir"
        )
    state = values["optimizer"]["state"]
    for name, moments in list(state.items()):
        # AdamW keeps nothing yet of an expert that no replayed step was routed to.
        if not any(f"optimizer.state.{name}.{moment}" in stored for moment in moments):
            del state[name]
    for section in ("rng", "ema"):
        # The RNG of a rank that did not exist, averages that were not kept.
        if any(f"{section}.{name}" not in stored for name in values.get(section, ())):
            del values[section]
    load(values, storage_reader=reader)
    set_model_state_dict(model, values["model"], options=_OPTIONS)
    set_optimizer_state_dict(model, optimizer, values["optimizer"], options=_OPTIONS)
    if "rng" in values:
        torch.set_rng_state(values["rng"][f"rank{mesh.rank}"])
    if ema is not None and "ema" not in values:
        ema.restart()


def read_train_state(checkpoint: Path) -> TrainState:
    """The position and identity stored in a checkpoint."""
    return TrainState(**json.loads((checkpoint / "train_state.json").read_text()))


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None. Partial ones do not count."""
    found = [
        (int(match[1]), path)
        for path in output_dir.glob("checkpoint-*")
        if (match := _NAME.fullmatch(path.name)) and (path / "manifest.json").is_file()
    ]
    return max(found)[1] if found else None


def verify_checkpoint(checkpoint: Path) -> None:
    """Compare every file with the manifest.

    Raises UserError with one line per damaged, missing or foreign file.
    """
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        step = int(manifest["step"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{checkpoint}: manifest.json is missing or unreadable ({type(error).__name__}): the "
            "checkpoint is "
            "incomplete; delete it to resume from the one before"
        ) from error
    problems: list[str] = []
    if checkpoint.name != f"checkpoint-{step}":
        problems.append(
            f"{checkpoint}: the manifest is of step {step}, the directory is not; restore its own manifest"
        )
    present = {_relative(checkpoint, path) for path in checkpoint.rglob("*") if path.is_file()} - {
        "manifest.json"
    }
    remedy = "delete this checkpoint to resume from the one before"
    for name in sorted(present | files.keys()):
        path = checkpoint / name
        if name not in files:
            problems.append(f"{path}: not in the manifest; {remedy}")
        elif name not in present:
            problems.append(f"{path}: missing; {remedy}")
        elif path.stat().st_size != files[name]["size"]:
            problems.append(
                f"{path}: {path.stat().st_size} bytes, the manifest says {files[name]['size']}; {remedy}"
            )
        elif _sha256(path) != files[name]["sha256"]:
            problems.append(f"{path}: its bytes differ from the manifest's sha256; {remedy}")
    if problems:
        raise UserError(*problems)


def clean_partials(output_dir: Path) -> None:
    """Delete what an interrupted save left behind."""
    for path in output_dir.glob(".partial-checkpoint-*"):
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path)


def _apply_retention(output_dir: Path, keep: int) -> None:
    checkpoints = sorted(
        (int(match[1]), path)
        for path in output_dir.glob("checkpoint-*")
        if (match := _NAME.fullmatch(path.name))
    )
    for _, path in checkpoints[:-keep] if keep > 0 else []:
        shutil.rmtree(path)


def _hash_files(root: Path, paths: Any) -> dict[str, dict[str, Any]]:
    return {
        _relative(root, path): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(paths)
    }


def _relative(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
