"""Low-rank adapters on the experts, through peft."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from wan_trainer.config.specs import LoraSpec
from wan_trainer.types import UserError

# Part of every adapter parameter's name, and so of checkpoints: it never changes.
ADAPTER = "default"

_ALIASES = {"high_noise": "transformer", "low_noise": "transformer_2"}


def apply_lora(experts: Mapping[str, WanTransformer3DModel], spec: LoraSpec, seed: int) -> None:
    """Add adapters to the linear layers whose name ends with a target suffix; everything else stays frozen.

    `spec.module_prefix` restricts them: "high_noise" or "low_noise" to that expert, anything else to modules
    whose name starts with it, in full ("transformer.blocks.0.attn1.to_q") or within any expert ("blocks.0").
    Adapters are float32 whatever the base's dtype, named `<layer>.lora_A.default.weight` beside
    `<layer>.base_layer.weight`. Raises UserError as `target_layers` does.
    """
    targets = target_layers(experts, spec)
    for name, expert in experts.items():
        if not targets[name]:
            continue
        expert.add_adapter(
            _adapter_config(spec, targets[name]),
            adapter_name=ADAPTER,
        )
        for parameter_name, parameter in expert.named_parameters():
            parameter.requires_grad_("lora_" in parameter_name)
            if "lora_" in parameter_name:
                parameter.data = parameter.data.to(torch.float32)
        initialise(name, expert, seed)


def target_layers(experts: Mapping[str, WanTransformer3DModel], spec: LoraSpec) -> dict[str, list[str]]:
    """Names of the linear layers that get an adapter, by expert; they may still be on the meta device.

    Raises UserError when a suffix matches no layer, naming those there are.
    """
    targets = {name: matching_layers(name, expert, spec) for name, expert in experts.items()}
    matched = [layer for layers in targets.values() for layer in layers]
    unmatched = [
        suffix for suffix in spec.target_modules if not any(_ends_with(layer, suffix) for layer in matched)
    ]
    if unmatched or not matched:
        where = f" under lora_module_prefix {spec.module_prefix}" if spec.module_prefix else ""
        trained = ", ".join(experts) or "none"
        raise UserError(
            f"lora_target_modules {', '.join(unmatched) or 'is empty and'} match no linear layer{where} "
            f"of the trained experts ({trained}): "
            f"available suffixes are {', '.join(available_suffixes(experts))}"
        )
    return targets


def matching_layers(expert_name: str, expert: WanTransformer3DModel, spec: LoraSpec) -> list[str]:
    """Names, within the expert, of the linear layers that get an adapter."""
    prefix = _ALIASES.get(spec.module_prefix or "", spec.module_prefix)
    start = "" if prefix is None else prefix.rstrip(".") + "."
    return [
        layer
        for layer in _linear_layers(expert)
        if any(_ends_with(layer, suffix) for suffix in spec.target_modules)
        and (layer.startswith(start) or f"{expert_name}.{layer}".startswith(start))
    ]


def available_suffixes(experts: Mapping[str, WanTransformer3DModel]) -> list[str]:
    """Last name parts of all linear layers, with the part before it where the last is only a number."""
    suffixes: set[str] = set()
    for expert in experts.values():
        for layer in _linear_layers(expert):
            parts = layer.split(".")
            suffixes.add(".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1])
    return sorted(suffixes)


def _adapter_config(spec: LoraSpec, layers: list[str]) -> LoraConfig:
    config = LoraConfig(r=spec.rank, target_modules=layers)
    config.lora_alpha = spec.alpha  # pyright: ignore[reportAttributeAccessIssue] - annotated int, used as a factor
    return config


@torch.no_grad()
def initialise(expert_name: str, expert: WanTransformer3DModel, seed: int) -> None:
    """Set lora_A to its uniform initialisation (Kaiming with a = sqrt(5), peft's) and lora_B to zero.

    Each tensor has its own generator keyed by its name, so that ranks, which draw the whole tensor and keep
    their shard, agree with each other and with any other number of ranks. Tensors on the meta device are left
    alone.
    """
    for name, parameter in expert.named_parameters():
        if "lora_" not in name or parameter.is_meta:
            continue
        if "lora_B" in name:
            parameter.zero_()
            continue
        key = hashlib.blake2b(f"{seed}/lora/{expert_name}.{name}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        bound = 1.0 / math.sqrt(parameter.shape[1])
        value = torch.from_numpy(generator.uniform(-bound, bound, tuple(parameter.shape)).astype(np.float32))
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            block = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            parameter.to_local().copy_(value[block])
        else:
            parameter.copy_(value)


def _ends_with(layer: str, suffix: str) -> bool:
    return layer == suffix or layer.endswith(f".{suffix}")


def _linear_layers(expert: WanTransformer3DModel) -> list[str]:
    return [name for name, module in expert.named_modules() if isinstance(module, nn.Linear)]
