"""An expert as a checkpoint leaves it, written under the names and in the files of its base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file

from wan_trainer.export.source import Source
from wan_trainer.export.start import StartingWeights
from wan_trainer.models.wan.adapter_files import scaling
from wan_trainer.models.wan.lora import ADAPTER
from wan_trainer.models.wan.weight_files import tensor_names, weight_files
from wan_trainer.models.wan.weights import Weights
from wan_trainer.types import UserError

# Read at once beside the file that is being filled: whole experts need not fit into memory.
_BATCH_ELEMENTS = 1 << 28
_INDEX_SUFFIX = ".safetensors.index.json"


class TrainedExpert:
    """The weights of one expert after training: trained ones, adapters merged, the start's for the rest.

    model: its component in the model directory.
    """

    def __init__(self, source: Source, name: str, start: StartingWeights) -> None:
        """Raises UserError when the start's tensors are not those that were trained."""
        self.model = start.model
        self._start = start
        self._state, self._section, self._prefix = source.state, source.section, f"{name}."
        self._stored = source.state.shapes(source.section, self._prefix)
        config = source.adapters.get(name)
        self._scale = None if config is None else scaling(config)
        self._adapted = {
            key.split(".lora_A.")[0]: (key, key.replace(".lora_A.", ".lora_B."))
            for key in self._stored
            if ".lora_A." in key
        }
        self._check(source.checkpoint)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors in float32, on the CPU."""
        layers = {name: self._adapted.get(name.removesuffix(".weight")) for name in names}
        wanted = [name for name in names if name in self._stored]
        wanted += [key for pair in layers.values() if pair is not None for key in pair]
        trained = self._state.read(self._section, wanted, self._prefix)
        start = self._start.read([name for name in names if name not in trained])
        for name in names:
            tensor = (trained[name] if name in trained else start[name]).to(torch.float32)
            pair = layers[name]
            if pair is not None:
                assert self._scale is not None
                down, up = (trained[key].to(torch.float32) for key in pair)
                tensor = tensor + self._scale * (up @ down)
            yield name, tensor

    def _check(self, checkpoint: Path) -> None:
        layers = {f"{layer}.weight" for layer in self._adapted}
        full = {name for name in self._stored if f".{ADAPTER}." not in name}
        foreign = sorted((full | layers) - self.model.names)
        shapes = {name: self._stored[name] for name in full if name in self.model.names}
        foreign += sorted(name for name, shape in shapes.items() if self.model.shape(name) != shape)
        for layer, (down, up) in self._adapted.items():
            shape = torch.Size((self._stored[up][0], self._stored[down][1]))
            if f"{layer}.weight" in self.model.names and self.model.shape(f"{layer}.weight") != shape:
                foreign.append(f"{layer}.weight")
        if foreign:
            raise UserError(
                f"{self.model.component} lacks {len(foreign)} of the tensors that {checkpoint} trained, "
                f"or has other shapes (first: {foreign[0]}): name the model that was trained with --model"
            )


def write_expert(out: Path, expert: TrainedExpert, dtype: torch.dtype | None) -> torch.dtype:
    """Fill the component directory `out` with weight files like the base's; return the dtype written.

    dtype: None for the base's. What Diffusers keeps in float32 is written in float32. One file is in memory
    at a time.
    """
    dtype = expert.model.dtype if dtype is None else dtype
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    total = 0
    for file in weight_files(expert.model.component):
        tensors: dict[str, torch.Tensor] = {}
        for names in _batches(expert.model, tensor_names(file)):
            for name, tensor in expert.read(names):
                keep = not kept.isdisjoint(name.split("."))
                tensors[name] = tensor.to(torch.float32 if keep else dtype).contiguous()
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        # safetensors lets nobody but the owner read what it writes.
        shutil.copymode(out / "config.json", out / file.name)
    for index in expert.model.component.glob(f"*{_INDEX_SUFFIX}"):
        value = json.loads(index.read_bytes())
        value["metadata"] = {**value.get("metadata", {}), "total_size": total}
        (out / index.name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    return dtype


def _batches(model: Weights, names: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    elements = 0
    for name in names:
        batch.append(name)
        elements += model.shape(name).numel()
        if elements >= _BATCH_ELEMENTS:
            yield batch
            batch, elements = [], 0
    if batch:
        yield batch
