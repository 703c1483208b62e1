"""Which Wan family a Diffusers directory holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from wan_trainer.config.paths import trainer_path

if TYPE_CHECKING:
    from wan_trainer.config.schema import GrpoConfig
    from wan_trainer.config.specs import Family


def read_family(model_path: Path) -> Family | None:
    """The family that `model_path`/model_index.json describes, None when it is missing or of another model.

    ti2v-5b is told by its per-token timesteps, a two-expert model by its second transformer, an
    image-to-video model by its pipeline class.
    """
    try:
        index: Any = json.loads((model_path / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict):
        return None
    facts = cast("dict[str, Any]", index)
    pipeline = facts.get("_class_name")
    if pipeline not in ("WanPipeline", "WanImageToVideoPipeline"):
        return None
    second = facts.get("transformer_2")
    experts = 1 if second is None or second == [None, None] else 2
    if facts.get("expand_timesteps"):
        return "ti2v-5b" if experts == 1 else None
    if pipeline == "WanImageToVideoPipeline":
        return "i2v-a14b" if experts == 2 else None
    return "t2v-a14b" if experts == 2 else "t2v-1.3b"


def known_family(config: GrpoConfig) -> Family | None:
    """The configured family, or what the model directory says; None when neither is known yet."""
    if config.model_family != "auto":
        return config.model_family
    return read_family(trainer_path(config.model_path)) if config.model_path else None
