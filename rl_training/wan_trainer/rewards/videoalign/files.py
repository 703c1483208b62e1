"""Where a VideoAlign checkpoint keeps its parts, found and tried without torch."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open

from wan_trainer.rewards.videoalign.options import HEADS, Options
from wan_trainer.types import UserError

MODEL_CONFIG = "model_config.json"
FULL = ("model.pth", "model.safetensors")
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
NOT_ADAPTER = "non_lora_state_dict.pth"
# Mean and standard deviation of each head's raw value over the authors' data; a checkpoint whose
# model_config.json has an inference_config brings its own.
PUBLISHED_STATISTICS: Mapping[str, tuple[float, float]] = {
    "VQ": (3.6757, 2.2476),
    "MQ": (1.1646, 1.3811),
    "TA": (2.8105, 2.5121),
}


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint, all of them readable.

    weights: in the order in which later ones add to and replace earlier ones. config: of Qwen2-VL.
    tokenizer: the directory of the tokenizer's files. lora_scale: (alpha, whether it is divided by the
    square root of the rank instead of the rank), None when nothing tells. statistics: (mean, standard
    deviation) of each head.
    """

    weights: tuple[Path, ...]
    config: Path
    tokenizer: Path
    lora_scale: tuple[float, bool] | None
    statistics: Mapping[str, tuple[float, float]]


def find_files(options: Options) -> CheckpointFiles:
    """The checkpoint under `model_path`, in any of the published layouts.

    `model_path` has the weights itself or in `checkpoint-N` directories, of which the highest N counts: one
    full state dict (model.pth or model.safetensors), or PEFT's adapter_model.safetensors with
    non_lora_state_dict.pth, which needs `base_model_path`. config.json and the tokenizer are looked for
    beside the weights, in `model_path`, and in `base_model_path`, in this order. Raises UserError with one
    line for each part that is missing or cannot be read.
    """
    for key, path in (("model_path", options.model_path), ("base_model_path", options.base_model_path)):
        if path is not None and not path.is_dir():
            raise UserError(
                f"videoalign.{key}: {path} is no directory; name the one that the checkpoint was saved in"
            )
    place = _newest(options.model_path)
    places = list(dict.fromkeys((place, options.model_path, options.base_model_path or place)))
    problems: list[str] = []
    weights = _weights(place, options.base_model_path, problems)
    for path in weights:
        _try_weights(path, problems)
    parents = [place, place.parent] if place.name.startswith("checkpoint-") else [place]
    described = next((at / MODEL_CONFIG for at in parents if (at / MODEL_CONFIG).is_file()), None)
    description = {} if described is None else _read_json(described, problems)
    _check_description(described, description, problems)
    config = _first(places, ("config.json",))
    if config is None:
        problems.append(_missing("config.json", "Qwen2-VL's config.json", options))
    else:
        kind = _read_json(config / "config.json", problems).get("model_type")
        if kind != "qwen2_vl":
            problems.append(
                f"videoalign.base_model_path: {config / 'config.json'} has model_type {kind}, not qwen2_vl; "
                "use the config.json of Qwen2-VL-2B-Instruct"
            )
    tokenizer = _first(places, ("tokenizer.json",)) or _first(places, ("vocab.json", "merges.txt"))
    if tokenizer is None:
        problems.append(_missing("tokenizer.json (or vocab.json and merges.txt)", "the tokenizer", options))
    scale = _lora_scale(place, description, problems)
    statistics = _statistics(described, description, problems)
    if problems or config is None or tokenizer is None:
        raise UserError(*problems)
    return CheckpointFiles(tuple(weights), config / "config.json", tokenizer, scale, statistics)


def _newest(model_path: Path) -> Path:
    """The directory with the weights: `model_path`, or its checkpoint of the highest step."""
    if any((model_path / name).is_file() for name in (*FULL, ADAPTER)):
        return model_path
    steps = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in model_path.glob("checkpoint-*")
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdecimal()
    }
    return steps[max(steps)] if steps else model_path


def _weights(place: Path, base: Path | None, problems: list[str]) -> list[Path]:
    for name in FULL:
        if (place / name).is_file():
            return [place / name]
    if not (place / ADAPTER).is_file():
        problems.append(
            f"videoalign.model_path: {place} has no weights ({', '.join((*FULL, ADAPTER))}); name the "
            "directory of a VideoReward checkpoint, or the one with its checkpoint-N directories"
        )
        return []
    shards = [] if base is None else sorted(base.glob("model*.safetensors"))
    if not shards:
        where = "base_model_path is not set" if base is None else f"{base} has no model*.safetensors"
        problems.append(
            f"videoalign.base_model_path: {place} has only an adapter and {where}; name a directory with the "
            "weights of Qwen2-VL-2B-Instruct"
        )
    if not (place / NOT_ADAPTER).is_file():
        problems.append(
            f"videoalign.model_path: {place / NOT_ADAPTER} is missing; {ADAPTER} beside it has no reward head"
        )
        return shards
    return [*shards, place / NOT_ADAPTER, place / ADAPTER]


def _try_weights(path: Path, problems: list[str]) -> None:
    """Only the outer form: a truncated or foreign file is found, no tensor is read."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "numpy"):
                return
        readable = zipfile.is_zipfile(path)
    except (OSError, SafetensorError):
        readable = False
    if not readable:
        problems.append(f"videoalign.model_path: {path} is no readable weight file; copy it again")


def _first(places: list[Path], names: tuple[str, ...]) -> Path | None:
    return next((place for place in places if all((place / name).is_file() for name in names)), None)


def _missing(names: str, what: str, options: Options) -> str:
    base = options.base_model_path
    where = f"{options.model_path}" if base is None else f"{options.model_path} or {base}"
    return (
        f"videoalign.base_model_path: {names} is not in {where}; copy {what} of Qwen2-VL-2B-Instruct there, "
        "or name the directory that has it"
    )


def _read_json(path: Path, problems: list[str]) -> dict[str, object]:
    try:
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        parsed = None
    if not isinstance(parsed, dict):
        problems.append(f"videoalign.model_path: {path} is no JSON object; copy it again")
        return {}
    return cast("dict[str, object]", parsed)


def _section(description: Mapping[str, object], name: str) -> dict[str, object]:
    section = description.get(name)
    return cast("dict[str, object]", section) if isinstance(section, dict) else {}


def _check_description(path: Path | None, description: Mapping[str, object], problems: list[str]) -> None:
    """A model trained without the special tokens reads its reward elsewhere."""
    model = _section(description, "model_config")
    if (
        model.get("use_special_tokens", True) is not True
        and model.get("reward_token", "special") != "special"
    ):
        problems.append(
            f"videoalign.model_path: {path} has reward_token {model['reward_token']}; only checkpoints "
            "with a special token for each head can be read"
        )


def _lora_scale(
    place: Path, description: Mapping[str, object], problems: list[str]
) -> tuple[float, bool] | None:
    adapter = place / ADAPTER_CONFIG
    section = (
        _read_json(adapter, problems) if adapter.is_file() else _section(description, "peft_lora_config")
    )
    alpha = section.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return None
    return float(alpha), section.get("use_rslora") is True


def _statistics(
    path: Path | None, description: Mapping[str, object], problems: list[str]
) -> Mapping[str, tuple[float, float]]:
    section = _section(description, "inference_config")
    if not section:
        return PUBLISHED_STATISTICS
    statistics: dict[str, tuple[float, float]] = {}
    for head in HEADS:
        mean, deviation = section.get(f"{head}_mean"), section.get(f"{head}_std")
        if (
            isinstance(mean, int | float)
            and isinstance(deviation, int | float)
            and math.isfinite(mean)
            and 0 < deviation < math.inf
        ):
            statistics[head] = (float(mean), float(deviation))
        else:
            problems.append(
                f"videoalign.model_path: {path} has inference_config without a usable {head}_mean and "
                f"{head}_std; mend or remove inference_config"
            )
    return statistics
