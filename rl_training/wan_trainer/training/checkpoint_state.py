"""What a checkpoint holds: the tensors by section, and where the run stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from wan_trainer.distributed.mesh import Mesh
from wan_trainer.training.ema import Ema
from wan_trainer.types import UserError

TRAIN_STATE = "train_state.json"
# Frozen weights are those of the model directory, which every start reads again.
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True)
class TrainState:
    """Where the run stands: batches trained (the position in the data), optimizer updates, policy version.

    contract: the config values, per group, that a resumed run must not change. wandb_id: None when not
    tracked. started_from: the weights the run started with, None for those of the model directory; frozen
    weights and the reference of a KL term are theirs.
    """

    step: int
    epoch: int
    updates: int
    policy_version: int
    seed: int
    world: int
    wandb_id: str | None
    contract: Mapping[str, Mapping[str, Any]]
    started_from: str | None = None


def read_train_state(checkpoint: Path) -> TrainState:
    """The position and identity stored in a checkpoint. Raises UserError when they cannot be read."""
    try:
        return TrainState(**json.loads((checkpoint / TRAIN_STATE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{checkpoint / TRAIN_STATE} is missing or not of this version ({type(error).__name__}): "
            "resume with the version that wrote it, or from another checkpoint"
        ) from error


def checkpoint_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, ema: Ema | None
) -> dict[str, Any]:
    """What a checkpoint stores, by section: tensors to write, or to read into.

    They are the model's own, not copies. Everything has a name, so that any layout of ranks reads it.
    """
    values: dict[str, Any] = {
        "model": get_model_state_dict(model, options=OPTIONS),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
        # One key per rank: values under one shared key are deduplicated and every rank would load rank 0's.
        "rng": {f"rank{mesh.rank}": torch.get_rng_state()},
    }
    if ema is not None:
        values["ema"] = dict(ema.averages)
    return values
