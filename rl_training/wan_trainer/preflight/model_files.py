"""The model directory: complete, not truncated, of the family that the config says. Loads no weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from wan_trainer.config.family import read_family
from wan_trainer.config.specs import Family
from wan_trainer.topology import FAMILIES

_MAX_HEADER = 100_000_000

# The files a component cannot do without; each inner tuple lists alternatives.
_NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    "scheduler": (("scheduler_config.json",),),
    "tokenizer": (("tokenizer_config.json",), ("tokenizer.json", "spiece.model")),
    "text_encoder": (("config.json",), ("model.safetensors", "model.safetensors.index.json")),
    "vae": (
        ("config.json",),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    ),
}
_NEEDED["transformer"] = _NEEDED["transformer_2"] = _NEEDED["vae"]
_REQUIRED = ("scheduler", "tokenizer", "text_encoder", "vae", "transformer")
_GET_WHOLE = "download or convert the directory again"


def check_model_directory(path: Path, family: Family | None) -> list[str]:
    """One line per thing that is missing, damaged or of another family; empty when it can be loaded."""
    index_path = path / "model_index.json"
    if not path.is_dir():
        return [
            f"model_path: {path} is not a directory: put a Diffusers-format Wan pipeline there, "
            "or set --model_path"
        ]
    index = _read_json(index_path)
    if index is None:
        return [
            f"model_path: {index_path} is missing or not JSON, a Diffusers pipeline has one; {_GET_WHOLE}"
        ]
    problems: list[str] = []
    for component in (*_REQUIRED, "transformer_2"):
        if _declared(index, component):
            problems += _check_component(path, component)
        elif component in _REQUIRED:
            problems.append(f"model_path: {index_path} names no {component}; {_GET_WHOLE}")
    if not problems:
        problems = _check_family(path, family)
    return problems


def trained_elements(path: Path, experts: tuple[str, ...]) -> int:
    """Parameters of the transformers named, from the headers of their weight files."""
    return sum(math.prod(shape) for expert in experts for _, shape in _tensors(path / expert))


def adapter_elements(path: Path, experts: tuple[str, ...], rank: int, target_modules: tuple[str, ...]) -> int:
    """Parameters of the adapters: rank x (in + out) for every matrix whose module name has the suffix."""
    suffixes = tuple(f".{target}.weight" for target in target_modules)
    matrices = (
        shape
        for expert in experts
        for name, shape in _tensors(path / expert)
        if name.endswith(suffixes) and len(shape) == 2
    )
    return sum(rank * sum(shape) for shape in matrices)


def weight_files(component: Path) -> tuple[list[Path], list[str]]:
    """The safetensors files of a component directory, and one line per shard that its index names in vain."""
    for index_path in sorted(component.glob("*.safetensors.index.json")):
        index = _read_json(index_path)
        weight_map = index.get("weight_map") if index is not None else None
        if not isinstance(weight_map, Mapping) or not weight_map:
            return [], [f"model_path: {index_path} has no weight_map; {_GET_WHOLE}"]
        shards = [component / str(name) for name in sorted(set(weight_map.values()))]
        missing = [shard for shard in shards if not shard.is_file()]
        lines = [
            f"model_path: {shard} is missing, {index_path.name} names it; {_GET_WHOLE}" for shard in missing
        ]
        return [shard for shard in shards if shard not in missing], lines
    return sorted(component.glob("*.safetensors")), []


def _declared(index: Mapping[str, object], component: str) -> bool:
    entry = index.get(component)
    return isinstance(entry, list) and len(entry) == 2 and all(entry)


def _check_component(root: Path, component: str) -> list[str]:
    directory = root / component
    if not directory.is_dir():
        return [f"model_path: {directory} is missing, model_index.json names it; {_GET_WHOLE}"]
    problems: list[str] = []
    for alternatives in _NEEDED[component]:
        present = [directory / name for name in alternatives if (directory / name).is_file()]
        if not present:
            hint = ""
            if "safetensors" in alternatives[0] and any(directory.glob("*.bin")):
                hint = " (there are .bin files: save it as safetensors)"
            problems.append(f"model_path: {directory} has no {' or '.join(alternatives)}{hint}; {_GET_WHOLE}")
        problems += [
            f"model_path: {file} is empty; {_GET_WHOLE}" for file in present if not file.stat().st_size
        ]
    shards, lines = weight_files(directory)
    problems += lines
    problems += [line for shard in shards if shard.stat().st_size and (line := _check_weights(shard))]
    return problems


def _check_weights(path: Path) -> str | None:
    header = _header(path)
    if header is None:
        return f"model_path: {path} is not a safetensors file; {_GET_WHOLE}"
    needed = header[1]
    actual = path.stat().st_size
    if actual != needed:
        line = f"model_path: {path} has {actual} bytes, its header says {needed}: an interrupted copy"
        return f"{line}; {_GET_WHOLE}"
    return None


def _header(path: Path) -> tuple[dict[str, dict], int] | None:
    """The tensor table of a safetensors file and the size the whole file must have."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= _MAX_HEADER:
            return None
        try:
            table = json.loads(stream.read(length))
        except ValueError:
            return None
    if not isinstance(table, dict):
        return None
    table.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
    return table, 8 + length + end


def _tensors(component: Path) -> Iterator[tuple[str, list[int]]]:
    for file in weight_files(component)[0]:
        header = _header(file)
        for name, entry in header[0].items() if header is not None else ():
            yield name, entry["shape"]


def _check_family(path: Path, family: Family | None) -> list[str]:
    """The family by the pipeline's index, and the channels its conditioning needs, whatever the widths."""
    found = read_family(path)
    if family is None or found != family:
        what = f"a {found} pipeline" if found else "of none of the known families"
        remedy = (
            f"set --model_family {found} or another --model_path" if found else "set another --model_path"
        )
        return [f"model_path: {path} is {what}, model_family is {family or 'auto'}; {remedy}"]
    problems: list[str] = []
    for component in ("transformer", "transformer_2")[: FAMILIES[family].experts]:
        config_path = path / component / "config.json"
        config = _read_json(config_path) or {}
        inputs, outputs = config.get("in_channels"), config.get("out_channels")
        if not isinstance(inputs, int) or not isinstance(outputs, int):
            problems.append(
                f"model_path: {config_path} does not state in_channels and out_channels; {_GET_WHOLE}"
            )
            continue
        # I2V-A14B concatenates a mask (4 channels) and the latent of the first frame to the noise.
        expected = 2 * outputs + 4 if family == "i2v-a14b" else outputs
        if inputs != expected:
            line = (
                f"model_path: {config_path} has in_channels {inputs}, a {family} transformer has {expected}"
            )
            problems.append(f"{line}; set another --model_path")
    return problems


def _read_json(path: Path) -> dict[str, object] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
