"""The tensors of a VideoAlign checkpoint under the names of today's transformers, adapters merged."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from wan_trainer.rewards.videoalign.files import CheckpointFiles
from wan_trainer.types import UserError, first_line

HEAD = "rm_head.weight"
EMBEDDING = "language_model.embed_tokens.weight"
_PEFT_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight")
_SAVED = re.compile(r"\.modules_to_save\.[^.]+\.")
# Published names (transformers of the time: `visual.`, `model.layers.`) and today's (`model.visual.`,
# `model.language_model.`) both become those of `Qwen2VLModel`. The first prefix that fits counts.
_PREFIXES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model."),
    ("model.embed_tokens.", "language_model.embed_tokens."),
    ("model.layers.", "language_model.layers."),
    ("model.norm.", "language_model.norm."),
)
# The language-model head writes no text here; in the published model it is tied to the embedding.
_UNUSED = "lm_head.weight"
_MOST_PROBLEMS = 8


def read_weights(files: CheckpointFiles, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in `dtype` on the CPU, by its name in the backbone or the head.

    The reward head stays float32. LoRA factors are added in float32, W + scale * B A, then rounded once. A
    name that is not known keeps its spelling. Raises UserError when a file cannot be read, or when a factor
    has no partner, no weight or no scale.
    """
    plain: dict[str, torch.Tensor] = {}
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for path in files.weights:
        for key, tensor in _read(path).items():
            name = key.removeprefix(_PEFT_PREFIX)
            factor = _FACTOR.fullmatch(name)
            if factor:
                factors.setdefault(_rename(factor["module"] + ".weight"), {})[factor["side"]] = tensor
            elif name != _UNUSED and ".original_module." not in name:
                name = _SAVED.sub(".", name).replace(".base_layer.", ".")
                plain[_rename(name)] = tensor
    source = files.weights[-1]
    for name, sides in factors.items():
        # Rounded at once: the float32 copies of all layers together would be gigabytes.
        plain[name] = _merged(name, plain, sides, files.lora_scale, source).to(dtype)
    return {name: tensor.to(torch.float32 if name == HEAD else dtype) for name, tensor in plain.items()}


def check_names(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], source: Path
) -> None:
    """Raise UserError, one line for each, when a tensor is missing, unknown, or of another shape."""
    problems = [
        f"videoalign.model_path: {source} lacks {_published(name)}; use a whole VideoReward checkpoint"
        for name in expected
        if name not in found
    ]
    problems += [
        f"videoalign.model_path: {source} has the unknown key {_published(name)}; use a VideoReward "
        "checkpoint"
        for name in found
        if name not in expected
    ]
    problems += [
        f"videoalign.model_path: {source} has {_published(name)} of shape {tuple(tensor.shape)}, config.json "
        f"makes it {tuple(expected[name].shape)}; use the config.json of this checkpoint"
        for name, tensor in found.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if len(problems) > _MOST_PROBLEMS:
        rest = len(problems) - _MOST_PROBLEMS
        problems = [
            *problems[:_MOST_PROBLEMS],
            f"videoalign.model_path: {rest} more tensors do not fit {source}",
        ]
    if problems:
        raise UserError(*problems)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Mapped, so that the ranks of a node share one copy in memory.
        state: object = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise UserError(
            f"videoalign.model_path: {path} cannot be read ({first_line(error)}); copy it again"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"videoalign.model_path: {path} is no state dict of tensors; name another checkpoint")
    return state


def _rename(name: str) -> str:
    for published, current in _PREFIXES:
        if name.startswith(published):
            return current + name.removeprefix(published)
    return name


def _published(name: str) -> str:
    """The name in a published checkpoint."""
    language_model = "language_model."
    return f"model.{name.removeprefix(language_model)}" if name.startswith(language_model) else name


def _merged(
    name: str,
    plain: Mapping[str, torch.Tensor],
    sides: Mapping[str, torch.Tensor],
    scale: tuple[float, bool] | None,
    source: Path,
) -> torch.Tensor:
    if sides.keys() != {"A", "B"} or name not in plain:
        lacking = "its weight" if name not in plain else f"lora_{'B' if 'A' in sides else 'A'}"
        raise UserError(
            f"videoalign.model_path: {source} has a LoRA factor of {_published(name)} without {lacking}; use "
            "a whole checkpoint"
        )
    if scale is None:
        raise UserError(
            f"videoalign.model_path: {source} has LoRA factors and nothing tells lora_alpha; put "
            "model_config.json or adapter_config.json of this checkpoint beside it"
        )
    down, up = sides["A"].float(), sides["B"].float()
    weight = plain[name]
    if up.shape[1] != down.shape[0] or (up.shape[0], down.shape[1]) != weight.shape:
        raise UserError(
            f"videoalign.model_path: {source} has LoRA factors of {_published(name)} that do not fit its "
            f"shape {tuple(weight.shape)}; use the base model it was trained on"
        )
    alpha, rank_stabilised = scale
    rank = down.shape[0]
    return weight.float() + alpha / (rank**0.5 if rank_stabilised else rank) * (up @ down)
