"""Checkpoints: distributed save by parameter name, atomic, checksummed, verified before use.

    <output_dir>/checkpoint-<step>/state/            torch.distributed.checkpoint files: model, optimizer,
                                                     rng, and ema when averages are kept
                                   lora/<expert>/    the adapters in PEFT's layout, when adapters are trained
                                   train_state.json  position and identity of the run
                                   manifest.json     written last: size and sha256 of every other file
    <output_dir>/latest                              the name of the newest complete checkpoint

A checkpoint is written under a temporary name and renamed once its manifest is on disk, so a directory called
`checkpoint-<step>` is complete or was damaged later, which `verify_checkpoint` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from wan_trainer.distributed.mesh import Mesh
from wan_trainer.models.wan.adapter_files import AdapterConfig
from wan_trainer.training.checkpoint_reader import load_checkpoint, load_weights
from wan_trainer.training.checkpoint_state import TrainState, read_train_state
from wan_trainer.training.checkpoint_writer import CheckpointWriter
from wan_trainer.training.ema import Ema

__all__ = [
    "CheckpointWriter",
    "TrainState",
    "load_checkpoint",
    "load_weights",
    "read_train_state",
    "save_checkpoint",
]


def save_checkpoint(
    output_dir: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    *,
    keep: int,
    ema: Ema | None = None,
    adapters: Mapping[str, AdapterConfig] | None = None,
) -> Path:
    """Write `checkpoint-<step>` and wait until it is complete; what `CheckpointWriter` says holds here."""
    writer = CheckpointWriter(output_dir, mesh, keep=keep, adapters=adapters)
    try:
        writer.start(state, model, optimizer, ema)
        written = writer.wait()
    finally:
        writer.close()
    assert written is not None
    return written
