"""What a Diffusers model directory holds, read without importing torch.

The preflight inspects a directory with this module before any process pays for loading weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_trainer.config.specs import Family
from wan_trainer.types import UserError

COMPONENTS = ("tokenizer", "text_encoder", "vae", "scheduler")


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

    Raises UserError with one line per problem: a missing directory, component or weight file, JSON that
    cannot be read, a pipeline that is no supported Wan family, or a family that is not `expected`.
    """
    if not path.is_dir():
        raise UserError(f"model directory {path} does not exist: download the model or correct model_path")
    index = _read_json(path / "model_index.json")
    experts = tuple(name for name in ("transformer", "transformer_2") if _present(index, name))
    missing = [name for name in (*COMPONENTS, *experts) if not (path / name).is_dir()]
    if "transformer" not in experts:
        missing.append("transformer")
    if missing:
        raise UserError(
            *(
                f"{path} lacks the component {name}/: the download is incomplete, fetch it again"
                for name in missing
            )
        )

    problems = [
        problem for name in ("text_encoder", "vae", *experts) for problem in missing_weights(path / name)
    ]
    if not any((path / "tokenizer" / name).is_file() for name in ("tokenizer.json", "spiece.model")):
        problems.append(
            f"{path / 'tokenizer'} holds no tokenizer.json or spiece.model: fetch the tokenizer again"
        )
    if problems:
        raise UserError(*problems)

    transformer = _read_json(path / "transformer" / "config.json")
    vae = _read_json(path / "vae" / "config.json")
    scheduler = _read_json(path / "scheduler" / "scheduler_config.json")
    family = family_of(path, index, transformer)
    if expected is not None and family != expected:
        raise UserError(
            f"model directory {path} holds a {family} pipeline but model_family is {expected}: "
            "correct model_family or model_path"
        )
    shift = scheduler.get("flow_shift", scheduler.get("shift"))
    boundary_ratio = index.get("boundary_ratio")
    if len(experts) == 2 and not isinstance(boundary_ratio, int | float):
        raise UserError(
            f"{path / 'model_index.json'} has two transformers but boundary_ratio is {boundary_ratio!r}: "
            "set it to the ratio the model was trained with (0.9 for I2V-A14B, 0.875 for T2V-A14B)"
        )
    frames, height, width = transformer.get("patch_size", (1, 2, 2))
    return WanDirectory(
        path=path,
        family=family,
        experts=experts,
        boundary_ratio=float(boundary_ratio) if boundary_ratio is not None and len(experts) == 2 else None,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        flow_shift=None if shift is None else float(shift),
        latent_channels=int(vae.get("z_dim", 16)),
        temporal_stride=int(vae.get("scale_factor_temporal", 4)),
        spatial_stride=int(vae.get("scale_factor_spatial", 8)),
        patch_size=(int(frames), int(height), int(width)),
    )


def family_of(path: Path, index: Mapping[str, Any], transformer: Mapping[str, Any]) -> Family:
    """The family that a model_index.json and its transformer's config.json describe.

    The pipeline class does not tell: the published TI2V-5B names WanPipeline. What tells is
    `expand_timesteps`, whether the transformer takes more channels than it returns (mask and image latent),
    and the number of experts.
    """
    pipeline = str(index.get("_class_name"))
    if pipeline not in ("WanPipeline", "WanImageToVideoPipeline"):
        raise UserError(
            f"{path} holds a {pipeline}, which is no Wan text- or image-to-video pipeline: "
            "point model_path to a Wan model in Diffusers format"
        )
    two_experts = _present(index, "transformer_2")
    if index.get("expand_timesteps", False):
        return "ti2v-5b"
    if transformer.get("image_dim") is not None:
        raise UserError(
            f"{path} conditions on CLIP image embeddings (Wan2.1 I2V), which is not supported: "
            "use a Wan2.2 model, or Wan2.1 T2V"
        )
    takes_image = transformer.get("in_channels", 16) != transformer.get("out_channels", 16)
    if takes_image and not two_experts:
        raise UserError(
            f"{path} is an image-to-video model with one transformer, which is no supported Wan family"
        )
    if takes_image:
        return "i2v-a14b"
    return "t2v-a14b" if two_experts else "t2v-1.3b"


def weight_files(component: Path) -> dict[str, Path] | None:
    """The safetensors files of a component by name, None when it has neither a file nor a shard index."""
    for stem in ("diffusion_pytorch_model", "model"):
        index = component / f"{stem}.safetensors.index.json"
        if index.is_file():
            names = _read_json(index).get("weight_map", {})
            return {str(name): component / str(name) for name in sorted(set(names.values()))}
        single = component / f"{stem}.safetensors"
        if single.is_file():
            return {single.name: single}
    return None


def missing_weights(component: Path) -> list[str]:
    """One line for each weight or configuration file that the component should have and has not."""
    problems = (
        [] if (component / "config.json").is_file() else [f"{component} lacks config.json: fetch it again"]
    )
    files = weight_files(component)
    if not files:
        return [*problems, f"{component} holds no safetensors weights: fetch the component again"]
    return problems + [
        f"{file} is named by its shard index but missing: fetch the component again"
        for file in files.values()
        if not file.is_file()
    ]


def _present(index: Mapping[str, Any], name: str) -> bool:
    """Whether model_index.json names a real component: absent ones are null or [null, null]."""
    entry = index.get(name)
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the model directory is incomplete, fetch it again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, not a JSON object: fetch it again")
    return value
