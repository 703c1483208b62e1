"""Reading safetensors weights tensor by tensor, and filling an expert with them, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformer3DModel
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from wan_trainer.config.specs import ModelSpec
from wan_trainer.models.wan.base_lora import BaseLora
from wan_trainer.models.wan.base_lora_files import base_lora_file
from wan_trainer.models.wan.starting_weights import starting_component, starting_files
from wan_trainer.types import UserError

# safetensors' spelling of the dtypes that published checkpoints use.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights:
    """The tensors of one component, mapped from its safetensors files and read on demand.

    Opening reads the headers only.
    """

    def __init__(self, component: Path, base_lora: BaseLora | None = None) -> None:
        """component: a directory, or one file. base_lora: merged into what is read.

        Raises UserError when a file is corrupt, `check_directory` or `check_starting_weights` has found it
        complete, and when the adapter is for another model.
        """
        self.component = component
        self._base_lora = base_lora
        self._handles: dict[str, Any] = {}
        for file in starting_files(component):
            try:
                handle = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} is not a whole safetensors file ({error}): fetch it again") from None
            self._handles.update(dict.fromkeys(handle.keys(), handle))
        assert self._handles, component
        if base_lora is not None:
            problems = base_lora.check({name: self.shape(name) for name in self.names})
            if problems:
                raise UserError(*problems)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._handles)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements of the checkpoint."""
        sizes: dict[torch.dtype, int] = {}
        for name, handle in self._handles.items():
            part = handle.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype(), torch.float32)
            sizes[dtype] = sizes.get(dtype, 0) + torch.Size(part.get_shape()).numel()
        return max(sizes, key=sizes.__getitem__)

    def shape(self, name: str) -> torch.Size:
        """Shape of one tensor, from the header."""
        return torch.Size(self._handles[name].get_slice(name).get_shape())

    def read(
        self, name: str, offset: Iterable[int] | None = None, shape: Iterable[int] | None = None
    ) -> torch.Tensor:
        """One tensor, or the block of `shape` at `offset` without reading the rest.

        In its stored dtype, or in float32 where an adapter is merged into it: whoever keeps it rounds it.
        """
        stored = self._read_stored(name, offset, shape)
        return stored if self._base_lora is None else self._base_lora.merged(name, stored, offset)

    def _read_stored(
        self, name: str, offset: Iterable[int] | None, shape: Iterable[int] | None
    ) -> torch.Tensor:
        try:
            if offset is None or shape is None:
                return self._handles[name].get_tensor(name)
            block = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            return (
                self._handles[name].get_slice(name)[block] if block else self._handles[name].get_tensor(name)
            )
        except SafetensorError as error:
            raise UserError(
                f"{self.component}: tensor {name} cannot be read ({error}): fetch it again"
            ) from None


def expert_weights(spec: ModelSpec, name: str) -> Weights:
    """The weights an expert starts with: those of `spec.weights_from`, if it has some, or of `spec.path`.

    What is read of them has `spec.base_lora` merged.

    Raises UserError when a file is damaged or the adapter is for another model.
    """
    component = None if spec.weights_from is None else starting_component(spec.weights_from, name)
    file = None if spec.base_lora is None else base_lora_file(spec.base_lora, name)
    return Weights(component or spec.path / name, None if file is None else BaseLora(file))


def check_names(expert: WanTransformer3DModel, weights: Weights) -> None:
    """Raises UserError unless the checkpoint has exactly the expert's tensors, each of the right shape."""
    shapes = {name: parameter.shape for name, parameter in expert.named_parameters()}
    problems: list[str] = []
    for verb, names in (
        ("lacks", shapes.keys() - weights.names),
        ("has the unknown", weights.names - shapes.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            problems.append(
                f"{weights.component} {verb} {len(names)} tensors ({listed}): "
                "the weights and config.json are of different models, fetch the component again"
            )
    problems += [
        f"{weights.component}: tensor {name} has shape {tuple(weights.shape(name))}, config.json asks for "
        f"{tuple(shape)}: the weights and config.json are of different models, fetch the component again"
        for name, shape in shapes.items()
        if name in weights.names and weights.shape(name) != shape
    ]
    if problems:
        raise UserError(*problems)


@torch.no_grad()
def fill(expert: WanTransformer3DModel, weights: Weights, device: torch.device) -> None:
    """Give a meta expert storage on `device` and read its base weights into it, each rank its own shard only.

    No process ever holds more of the checkpoint than one tensor's shard beyond its own parameters, so that
    two 14B experts in float32 load on a node whose memory could not hold one copy per rank. Adapter tensors
    are left for `lora.initialise`, and the rotary tables, which no checkpoint stores, are computed anew.
    """
    expert.to_empty(device=device)
    for name, parameter in base_parameters(expert):
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            if 0 in shape:  # more ranks than rows: this rank owns nothing of the tensor
                continue
            target.copy_(weights.read(name, offset, shape))
        else:
            target.copy_(weights.read(name))
    expert.rope = rotary_tables(expert).to(device)


def base_parameters(expert: WanTransformer3DModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters that a checkpoint holds, under its names: adapters wrap layers as `base_layer`."""
    for name, parameter in expert.named_parameters():
        if "lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def rotary_tables(expert: WanTransformer3DModel) -> WanRotaryPosEmbed:
    """The expert's rotary position tables, on the CPU."""
    config: Mapping[str, Any] = expert.config
    with torch.device("cpu"):
        return WanRotaryPosEmbed(
            config["attention_head_dim"], tuple(config["patch_size"]), config["rope_max_seq_len"]
        )
