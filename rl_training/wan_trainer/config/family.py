"""Which Wan family a Diffusers directory holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from wan_trainer.config.paths import trainer_path

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig
    from wan_trainer.config.specs import Family


def family_of(index: Mapping[str, Any], transformer: Mapping[str, Any]) -> Family:
    """The family that a model_index.json and its transformer's config.json describe.

    The pipeline class does not tell: the published TI2V-5B names WanPipeline. What tells is
    `expand_timesteps`, whether the transformer takes more channels than it returns (mask and image latent),
    and the number of experts. Raises ValueError, which says what the directory holds instead.
    """
    pipeline = index.get("_class_name")
    if pipeline not in ("WanPipeline", "WanImageToVideoPipeline"):
        raise ValueError(f"holds a {pipeline}, which is no Wan text- or image-to-video pipeline")
    if transformer.get("image_dim") is not None:
        raise ValueError("conditions on CLIP image embeddings (Wan2.1 I2V), which is not supported")
    # The defaults are Diffusers'.
    takes_image = transformer.get("in_channels", 16) != transformer.get("out_channels", 16)
    two_experts = names_component(index, "transformer_2")
    if index.get("expand_timesteps") and not two_experts:
        return "ti2v-5b"
    if index.get("expand_timesteps") or (takes_image and not two_experts):
        what = "per-token timesteps" if index.get("expand_timesteps") else "an image-to-video model"
        count = "two transformers" if two_experts else "one transformer"
        raise ValueError(f"holds {what} with {count}, which is no supported Wan family")
    if takes_image:
        return "i2v-a14b"
    return "t2v-a14b" if two_experts else "t2v-1.3b"


def names_component(index: Mapping[str, Any], name: str) -> bool:
    """Whether model_index.json names a real component: absent ones are null or [null, null]."""
    entry = index.get(name)
    return isinstance(entry, list) and len(cast("list[object]", entry)) == 2 and entry[1] is not None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, naming the file, when there is none."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", value)


def read_family(model_path: Path) -> Family | None:
    """The family of the directory `model_path`, None when it cannot be read or is of another model."""
    try:
        return family_of(
            read_json_object(model_path / "model_index.json"),
            read_json_object(model_path / "transformer" / "config.json"),
        )
    except ValueError:
        return None


def known_family(config: TrainConfig) -> Family | None:
    """The configured family, or what the model directory says; None when neither is known yet."""
    if config.model_family != "auto":
        return config.model_family
    return read_family(trainer_path(config.model_path)) if config.model_path else None
