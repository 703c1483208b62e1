"""A LoRA that is merged into an expert's weights while they are read: W + scale * B A, and so of biases.

Diffusers reads the file and converts its names, so that what its pipelines load is merged: its own layout,
`diffusion_model.*` with lora_A/B or lora_down/up and alphas, and `lora_unet_*`. PEFT's layout is read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError

from wan_trainer.models.wan.base_lora_files import PEFT_CONFIG
from wan_trainer.models.wan.weight_files import tensor_names
from wan_trainer.types import UserError, first_line

_PEFT, _DIFFUSERS = "base_model.model.", "transformer."
_SIDES = {".lora_A.weight": "down", ".lora_B.weight": "up", ".lora_B.bias": "bias"}
_CONVERSION_ERRORS = (OSError, KeyError, ValueError, RuntimeError, TypeError, IndexError, SafetensorError)


@dataclass
class _Change:
    """What is added to one layer: scale * up @ down to its weight, scale * bias to its bias."""

    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: float = 1.0


class BaseLora:
    """The changes that one LoRA file makes to an expert. Its matrices stay mapped from the file."""

    def __init__(self, file: Path) -> None:
        """Raises UserError, one line for each thing that could not be merged faithfully."""
        self.file = file
        tensors, config = _read(file)
        self._changes: dict[str, _Change] = {}
        unknown: list[str] = []
        for key, tensor in tensors.items():
            side = next((suffix for suffix in _SIDES if key.endswith(suffix)), None)
            if side is None:
                unknown.append(key)
            else:
                change = self._changes.setdefault(key.removesuffix(side), _Change())
                setattr(change, _SIDES[side], tensor)
        problems = [_unknown(file, unknown)] if unknown or not self._changes else []
        for layer, change in self._changes.items():
            problems += _incomplete(file, layer, change)
        if not problems:
            problems = self._set_scales(config)
        if problems:
            raise UserError(*problems)

    def check(self, shapes: Mapping[str, torch.Size]) -> list[str]:
        """What does not fit an expert of these tensors, one line each."""
        foreign = [layer for layer in self._changes if f"{layer}.weight" not in shapes]
        lines = [_unknown(self.file, foreign)] if foreign else []
        for layer, change in self._changes.items():
            if layer in foreign:
                continue
            needed, found = shapes[f"{layer}.weight"], change_shape(change)
            if found is not None and found != needed:
                lines.append(
                    f"base_lora: {self.file}: {layer} is for a weight of {tuple(found)}, and the model's has "
                    f"{tuple(needed)}: it was made for another model, set another --base_lora"
                )
            if change.bias is not None and shapes.get(f"{layer}.bias") != change.bias.shape:
                lines.append(
                    f"base_lora: {self.file}: {layer} has a bias of {change.bias.numel()}, and the model has "
                    "none of that size: it was made for another model, set another --base_lora"
                )
        return lines

    def merged(self, name: str, tensor: torch.Tensor, offset: Iterable[int] | None = None) -> torch.Tensor:
        """`tensor`, which is the block at `offset` of the expert's tensor `name`, with its change in float32.

        As it is when nothing changes it: rounding is left to whoever stores it, so that it happens once.
        """
        layer, _, part = name.rpartition(".")
        change = self._changes.get(layer)
        block = [
            slice(start, start + size)
            for start, size in zip(offset or (0,) * tensor.dim(), tensor.shape, strict=True)
        ]
        added: torch.Tensor | None = None
        if change is not None and part == "weight" and change.up is not None:
            assert change.down is not None, "a pair is whole"
            rows, columns = block
            added = change.up[rows].to(torch.float32) @ change.down[:, columns].to(torch.float32)
        elif change is not None and part == "bias" and change.bias is not None:
            added = change.bias[block[0]].to(torch.float32)
        if change is None or added is None:
            return tensor
        return tensor.to(torch.float32) + change.scale * added

    def _set_scales(self, config: Mapping[str, Any] | None) -> list[str]:
        """Alpha over rank as the file's configuration says; without one it is 1, as in Diffusers."""
        if config is None:
            return []
        try:
            ranks, alphas = (dict(config.get(key) or {}) for key in ("rank_pattern", "alpha_pattern"))
            for layer, change in self._changes.items():
                rank = int(_of_layer(ranks, layer, config["r"]))
                alpha = float(_of_layer(alphas, layer, config["lora_alpha"]))
                if change.up is not None and change.up.shape[1] != rank:
                    return [
                        f"base_lora: {self.file}: {layer} has rank {change.up.shape[1]}, and its "
                        f"configuration says {rank}: the two are of different adapters, fetch them again"
                    ]
                change.scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            return [
                f"base_lora: {self.file}: its configuration states no usable r and lora_alpha "
                f"({type(error).__name__}): fetch it again"
            ]
        return []


def change_shape(change: _Change) -> torch.Size | None:
    """The shape of the weight that a change is for; None when it has a bias alone."""
    if change.up is None or change.down is None:
        return None
    return torch.Size((change.up.shape[0], change.down.shape[1]))


def _of_layer(pattern: Mapping[str, Any], layer: str, default: Any) -> Any:
    return pattern.get(get_pattern_key(list(pattern), layer), default)


def _read(file: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, Any] | None]:
    """The tensors by `<layer>.lora_A.weight` and so on, and the adapter's configuration if it has one."""
    names = tensor_names(file)
    dora = [name for name in names if "dora_scale" in name or "lora_magnitude_vector" in name]
    if dora:
        raise UserError(
            f"base_lora: {file} is a DoRA ({dora[0]}), whose magnitudes a sum cannot hold: merge it into the "
            "model directory beforehand"
        )
    if any(name.startswith(_PEFT) for name in names):
        return _read_with_diffusers(file, _PEFT)[0], _peft_config(file)
    tensors, metadata = _read_with_diffusers(file, _DIFFUSERS)
    if metadata is None:
        return tensors, None
    return tensors, {key.removeprefix(_DIFFUSERS): value for key, value in metadata.items()}


def _read_with_diffusers(file: Path, prefix: str) -> tuple[dict[str, torch.Tensor], Mapping[str, Any] | None]:
    arguments: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    try:
        loaded: Any = WanLoraLoaderMixin.lora_state_dict(str(file), return_lora_metadata=True, **arguments)
    except _CONVERSION_ERRORS as error:
        raise UserError(
            f"base_lora: {file} is no LoRA of a Wan transformer that Diffusers reads "
            f"({type(error).__name__}: {first_line(error)}): set another --base_lora"
        ) from None
    state, metadata = loaded
    return {key.removeprefix(prefix): tensor for key, tensor in state.items()}, metadata


def _peft_config(file: Path) -> Mapping[str, Any]:
    path = file.parent / PEFT_CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"base_lora: {file} has PEFT's names, and {path}, which states its alpha, cannot be read "
            f"({type(error).__name__}): put it there"
        ) from None
    for key in ("use_dora", "fan_in_fan_out"):
        if config.get(key):
            raise UserError(
                f"base_lora: {path} sets {key}, which cannot be merged: merge it into the model beforehand"
            )
    return config


def _incomplete(file: Path, layer: str, change: _Change) -> list[str]:
    """A line for a pair that lacks a side, or whose sides do not fit each other."""
    if change.down is None and change.up is None and change.bias is not None:
        return []
    shapes = [None if side is None else tuple(side.shape) for side in (change.down, change.up)]
    down, up = shapes
    if down is not None and up is not None and len(down) == len(up) == 2 and down[0] == up[1]:
        return []
    found = f"lora_A {down or 'missing'}, lora_B {up or 'missing'}"
    return [f"base_lora: {file}: {layer} is no pair of matrices ({found}): fetch it again"]


def _unknown(file: Path, names: list[str]) -> str:
    if not names:
        return f"base_lora: {file} holds no adapter: set another --base_lora"
    return (
        f"base_lora: {file}: {len(names)} of its keys match no linear layer of the model (first: "
        f"{names[0]}): it was made for another model, set another --base_lora"
    )
