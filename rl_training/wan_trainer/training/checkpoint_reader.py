"""Reading checkpoints: the whole training state, or the weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from wan_trainer.distributed.collectives import SharedUserError
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.training.checkpoint_state import OPTIONS, checkpoint_values
from wan_trainer.training.ema import Ema
from wan_trainer.training.stored_state import STATE

_ADAPTER = ".lora_"


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
    reader = FileSystemReader(checkpoint / STATE)
    values = checkpoint_values(model, optimizer, mesh, ema)
    stored = reader.read_metadata().state_dict_metadata
    _check_adapters(checkpoint, list(values["model"]), stored)
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
    set_model_state_dict(model, values["model"], options=OPTIONS)
    set_optimizer_state_dict(model, optimizer, values["optimizer"], options=OPTIONS)
    if "rng" in values:
        torch.set_rng_state(values["rng"][f"rank{mesh.rank}"])
    if ema is not None and "ema" not in values:
        ema.restart()


def load_weights(checkpoint: Path, model: nn.Module) -> list[str]:
    """Read the weights that a checkpoint trained into `model`; return their names.

    Adapters go to adapters, whole weights to weights, those below adapters included. Each rank reads its own
    shards, without communication; verify first. Raises SharedUserError when a tensor has no place here, or,
    in a model of which nothing is trained, leaves it out: the reference of a KL term lacks what is frozen.
    """
    reader = FileSystemReader(checkpoint / STATE)
    stored = reader.read_metadata().state_dict_metadata
    targets = {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}
    trained = any(parameter.requires_grad for parameter in targets.values())
    sizes = {
        key.removeprefix("model."): getattr(entry, "size", None)
        for key, entry in stored.items()
        if key.startswith("model.") and (trained or key.removeprefix("model.") in targets)
    }
    _check_adapters(checkpoint, [name for name in targets if _ADAPTER in name], stored, weights_only=True)
    foreign = sorted(
        name for name, size in sizes.items() if name not in targets or targets[name].shape != size
    )
    if foreign or not sizes:
        first = f" (first: {foreign[0]})" if foreign else ""
        raise SharedUserError(
            f"resume_from: {checkpoint}: {len(foreign)} of its {len(sizes)} weights have no place in this "
            f"model, or another shape{first}: it was written by another model or LoRA setting; set another "
            "--resume_from, or null"
        )
    values: dict[str, Any] = {"model": {name: targets[name].detach() for name in sizes}}
    load(values, storage_reader=reader, no_dist=True)
    return sorted(sizes)


def _check_adapters(
    checkpoint: Path, trained: list[str], stored: dict[str, Any], *, weights_only: bool = False
) -> None:
    """Raises SharedUserError when one of run and checkpoint has adapters and the other has not.

    weights_only: whole weights are a good start for fresh adapters.
    """
    theirs = any(key.startswith("model.") and _ADAPTER in key for key in stored)
    ours = any(_ADAPTER in name for name in trained)
    if theirs and not ours:
        raise SharedUserError(
            f"lora_rank: {checkpoint} holds adapters and this run trains whole weights; restore lora_rank, "
            "or merge them (wan-trainer export --to diffusers) and start from the result with --resume_from"
        )
    if ours and not theirs and not weights_only:
        raise SharedUserError(
            f"lora_rank: {checkpoint} holds whole weights and this run trains adapters; set --lora_rank 0, "
            "or start adapters on its weights with --resume_from and another output_dir"
        )
