"""Adapters as files that other programs load: PEFT's layout, and Diffusers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file

from wan_trainer.models.wan.lora import ADAPTER
from wan_trainer.types import UserError

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
# What PEFT puts before the names of the model it wraps, and Diffusers before those of either expert.
_PEFT_PREFIX, _DIFFUSERS_PREFIX = "base_model.model.", "transformer."

AdapterConfig = Mapping[str, Any]


def adapter_configs(experts: Mapping[str, WanTransformer3DModel], base: Path) -> dict[str, AdapterConfig]:
    """PEFT's configuration of the adapters of each expert that has some, as plain data.

    base: the model directory they were trained on.
    """
    return {
        name: _plain(expert.peft_config[ADAPTER].to_dict())
        | {"base_model_name_or_path": str(base / name), "inference_mode": True}
        for name, expert in experts.items()
        if ADAPTER in getattr(expert, "peft_config", {})
    }


def write_adapter(directory: Path, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `directory` in PEFT's layout: adapter_config.json and adapter_model.safetensors.

    tensors: by parameter name within the expert (`blocks.0.attn1.to_q.lora_A.default.weight`).
    `PeftModel.from_pretrained(transformer, directory)` loads it.
    """
    directory.mkdir(parents=True)
    (directory / PEFT_CONFIG).write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    _save(directory / PEFT_WEIGHTS, _PEFT_PREFIX, tensors, {})


def write_diffusers_adapter(
    directory: Path, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Add Diffusers' file to `directory`: `pipeline.load_lora_weights(directory)` loads it.

    Rank and alpha are in its header; without them Diffusers would take alpha to be the rank.
    """
    header = {f"{_DIFFUSERS_PREFIX}{key}": value for key, value in config.items()}
    metadata = {LORA_ADAPTER_METADATA_KEY: json.dumps(header, sort_keys=True)}
    _save(directory / LORA_WEIGHT_NAME_SAFE, _DIFFUSERS_PREFIX, tensors, metadata)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The configuration that `write_adapter` left. Raises UserError when there is none."""
    path = directory / PEFT_CONFIG
    try:
        config = json.loads(path.read_bytes())
        scaling(config)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            f"{path} does not describe adapters ({type(error).__name__}): use another checkpoint of the run"
        ) from error
    return config


def scaling(config: AdapterConfig) -> float:
    """What the product of an adapter's matrices is multiplied by."""
    return float(config["lora_alpha"]) / int(config["r"])


def _save(path: Path, prefix: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    named = {
        prefix + name.replace(f".{ADAPTER}.", "."): tensor.contiguous() for name, tensor in tensors.items()
    }
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in named), sorted(named)[:3]
    save_file(named, path, metadata={"format": "pt", **metadata})
    # safetensors lets nobody but the owner read what it writes.
    shutil.copymode(path.parent / PEFT_CONFIG, path)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
