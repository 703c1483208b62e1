"""The tensors of a checkpoint, read by name in one process, whatever number of ranks and layout wrote it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

STATE = "state"
ADAPTERS = "lora"


class StoredState:
    """A checkpoint's distributed tensors as whole tensors on the CPU; opening reads their table only.

    Sections are "model" (trained weights), "ema" (their averages) and "optimizer". No process group is
    needed, and one that there is stays unused.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._reader = _OnceReader(checkpoint / STATE)
        table = self._reader.read_metadata().state_dict_metadata
        self._tensors = {
            key: entry for key, entry in table.items() if isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self, section: str, prefix: str = "") -> dict[str, torch.Size]:
        """Whole shapes of a section's tensors whose name starts with `prefix`, which the keys here lack."""
        start = f"{section}.{prefix}"
        return {
            key.removeprefix(start): entry.size
            for key, entry in self._tensors.items()
            if key.startswith(start)
        }

    def read(self, section: str, names: Iterable[str], prefix: str = "") -> dict[str, torch.Tensor]:
        """These tensors of a section by name, without `prefix`, in their stored dtype. Reads nothing else."""
        values = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name in names
            if (entry := self._tensors[f"{section}.{prefix}{name}"])
        }
        stored: dict[str, Any] = {f"{section}.{prefix}{name}": tensor for name, tensor in values.items()}
        with warnings.catch_warnings():
            # PyTorch finds it noteworthy that there is one process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            if stored:
                load(stored, storage_reader=self._reader, no_dist=True)
        return values


class _OnceReader(FileSystemReader):
    """Reads the table once, not at each load: that of a state which many ranks wrote takes seconds."""

    _table: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._table is None:
            self._table = super().read_metadata(*args, **kwargs)
        return self._table
