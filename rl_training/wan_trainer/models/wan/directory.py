"""What a Diffusers model directory holds, read without importing torch.

Preflight and the loader ask the same questions here: a directory that passes before the launch also loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_trainer.config.family import family_of, names_component, read_json_object
from wan_trainer.config.specs import Experts, Family, ModelSpec
from wan_trainer.models.wan.weight_files import damage, weight_files
from wan_trainer.types import UserError

EXPERTS = ("transformer", "transformer_2")
DEFAULT_FLOW_SHIFT = 5.0
_REQUIRED = ("scheduler", "tokenizer", "text_encoder", "vae", "transformer")
_TRAINED: dict[Experts, tuple[str, ...]] = {"both": EXPERTS, "high": EXPERTS[:1], "low": EXPERTS[1:]}
# The files a component cannot do without; each inner tuple lists alternatives.
_DIFFUSERS_MODEL = (
    ("config.json",),
    ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
)
_NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    "scheduler": (("scheduler_config.json",),),
    "tokenizer": (("tokenizer_config.json",), ("tokenizer.json", "spiece.model")),
    "text_encoder": (("config.json",), ("model.safetensors", "model.safetensors.index.json")),
    "vae": _DIFFUSERS_MODEL,
    "transformer": _DIFFUSERS_MODEL,
    "transformer_2": _DIFFUSERS_MODEL,
}
_GET_WHOLE = "download or convert the directory again"


@dataclass(frozen=True)
class WanDirectory:
    """A complete Wan pipeline directory.

    experts: the transformers present, high-noise first. boundary_ratio: from model_index.json, None with one
    expert. expand_timesteps: one timestep per token (TI2V-5B). flow_shift: of the scheduler, None when it
    names none. Strides are the VAE's; patch_size is the transformer's (frames, height, width).
    """

    path: Path
    family: Family
    experts: tuple[str, ...]
    boundary_ratio: float | None
    expand_timesteps: bool
    flow_shift: float | None
    latent_channels: int
    temporal_stride: int
    spatial_stride: int
    patch_size: tuple[int, int, int]


def read_directory(path: Path, expected: Family | None = None) -> WanDirectory:
    """Read the configuration files of the pipeline at `path`.

    Raises UserError with the lines of `check_directory`.
    """
    problems = check_directory(path, expected)
    if problems:
        raise UserError(*problems)
    index = read_json_object(path / "model_index.json")
    transformer = read_json_object(path / "transformer" / "config.json")
    vae = read_json_object(path / "vae" / "config.json")
    scheduler = read_json_object(path / "scheduler" / "scheduler_config.json")
    experts = _experts(index)
    shift = scheduler.get("flow_shift", scheduler.get("shift"))
    frames, height, width = transformer.get("patch_size", (1, 2, 2))
    return WanDirectory(
        path=path,
        family=family_of(index, transformer),
        experts=experts,
        boundary_ratio=float(index["boundary_ratio"]) if len(experts) == 2 else None,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        flow_shift=None if shift is None else float(shift),
        latent_channels=int(vae.get("z_dim", 16)),
        temporal_stride=int(vae.get("scale_factor_temporal", 4)),
        spatial_stride=int(vae.get("scale_factor_spatial", 8)),
        patch_size=(int(frames), int(height), int(width)),
    )


def check_directory(path: Path, expected: Family | None = None) -> list[str]:
    """One line per thing that is missing, damaged or of another family than `expected`.

    Empty when the pipeline can be loaded. Reads configurations and the headers of weight files, no weights.
    """
    if not path.is_dir():
        return [
            f"model_path: {path} is not a directory: put a Diffusers-format Wan pipeline there, "
            "or set --model_path"
        ]
    try:
        index = read_json_object(path / "model_index.json")
    except ValueError as error:
        return [f"model_path: {error}, a Diffusers pipeline has one; {_GET_WHOLE}"]
    problems: list[str] = []
    for component in (*_REQUIRED, "transformer_2"):
        if names_component(index, component):
            problems += _check_component(path / component)
        elif component in _REQUIRED:
            problems.append(f"model_path: {path / 'model_index.json'} names no {component}; {_GET_WHOLE}")
    return problems or _check_family(path, index, expected)


def trained_experts(spec: ModelSpec, experts: Sequence[str]) -> tuple[str, ...]:
    """Those of `experts` that `train_experts` names; a family with one expert trains that one."""
    return tuple(name for name in experts if len(experts) == 1 or name in _TRAINED[spec.train_experts])


def _experts(index: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in EXPERTS if names_component(index, name))


def _check_component(directory: Path) -> list[str]:
    if not directory.is_dir():
        return [f"model_path: {directory} is missing, model_index.json names it; {_GET_WHOLE}"]
    problems: list[str] = []
    for alternatives in _NEEDED[directory.name]:
        present = [directory / name for name in alternatives if (directory / name).is_file()]
        if not present:
            hint = ""
            if "safetensors" in alternatives[0] and any(directory.glob("*.bin")):
                hint = " (there are .bin files: save it as safetensors)"
            problems.append(f"{directory} has no {' or '.join(alternatives)}{hint}")
        problems += [f"{file} is empty" for file in present if not file.stat().st_size]
    for name in ("config.json", "scheduler_config.json"):
        file = directory / name
        if file.is_file() and file.stat().st_size:
            problems += _check_json(file)
    problems += _check_weights(directory)
    return [f"model_path: {line}; {_GET_WHOLE}" for line in problems]


def _check_json(file: Path) -> list[str]:
    try:
        read_json_object(file)
    except ValueError as error:
        return [str(error)]
    return []


def _check_weights(directory: Path) -> list[str]:
    try:
        files = weight_files(directory)
    except ValueError as error:
        return [str(error)]
    problems: list[str] = []
    for file in files:
        if not file.is_file():
            problems.append(f"{file} is missing, its shard index names it")
        elif file.stat().st_size and (line := damage(file)):
            problems.append(line)
    return problems


def _check_family(path: Path, index: Mapping[str, Any], expected: Family | None) -> list[str]:
    """The family, and what its conditioning needs of channels and boundary, whatever the widths."""
    configs = {name: read_json_object(path / name / "config.json") for name in _experts(index)}
    try:
        family = family_of(index, configs["transformer"])
    except ValueError as reason:
        return [f"model_path: {path} {reason}; set another --model_path"]
    if expected is not None and family != expected:
        return [
            f"model_path: {path} holds a {family} pipeline but model_family is {expected}; "
            f"set --model_family {family} or another --model_path"
        ]
    problems: list[str] = []
    for name, config in configs.items():
        inputs, outputs = config.get("in_channels", 16), config.get("out_channels", 16)
        # I2V-A14B concatenates a mask (4 channels) and the latent of the first frame to the noise.
        needed = 2 * outputs + 4 if family == "i2v-a14b" else outputs
        if inputs != needed:
            problems.append(
                f"model_path: {path / name / 'config.json'} has in_channels {inputs}, a {family} transformer "
                f"has {needed}; set another --model_path"
            )
    ratio = index.get("boundary_ratio")
    if len(configs) == 2 and not isinstance(ratio, int | float):
        problems.append(
            f"model_path: {path / 'model_index.json'} has two transformers but boundary_ratio is {ratio!r}; "
            "set it to the ratio the model was trained with (0.9 for I2V-A14B, 0.875 for T2V-A14B)"
        )
    return problems
