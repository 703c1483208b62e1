"""The safetensors files of a component, by their headers alone: no torch, no tensor is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wan_trainer.config.family import read_json_object

_STEMS = ("diffusion_pytorch_model", "model")
_MAX_HEADER = 100_000_000


def weight_files(component: Path) -> list[Path]:
    """The shards that the component's index names, there or not, else its single file; [] without weights.

    Raises ValueError for an index that names none.
    """
    for stem in _STEMS:
        index = component / f"{stem}.safetensors.index.json"
        if index.is_file():
            weight_map = read_json_object(index).get("weight_map")
            if not isinstance(weight_map, Mapping) or not weight_map:
                raise ValueError(f"{index} has no weight_map")
            return [component / str(name) for name in sorted(set(weight_map.values()))]
        single = component / f"{stem}.safetensors"
        if single.is_file():
            return [single]
    return []


def damage(file: Path) -> str | None:
    """What is wrong with a weight file that exists: no safetensors, or not as long as its header says."""
    header = _header(file)
    if header is None:
        return f"{file} is not a safetensors file"
    actual, needed = file.stat().st_size, header[1]
    if actual != needed:
        return f"{file} has {actual} bytes, its header says {needed}: an interrupted copy"
    return None


def count_elements(component: Path) -> int:
    """Parameters of a component."""
    return sum(math.prod(shape) for _, shape in _tensors(component))


def count_adapter_elements(component: Path, rank: int, target_modules: tuple[str, ...]) -> int:
    """Parameters of the adapters: rank x (in + out) for every matrix whose module name has the suffix."""
    suffixes = tuple(f".{target}.weight" for target in target_modules)
    return sum(
        rank * sum(shape)
        for name, shape in _tensors(component)
        if name.endswith(suffixes) and len(shape) == 2
    )


def tensor_names(file: Path) -> list[str]:
    """The tensors of one weight file, in the order of its header."""
    header = _header(file)
    assert header is not None, file
    return list(header[0])


def _tensors(component: Path) -> Iterator[tuple[str, list[int]]]:
    for file in weight_files(component):
        header = _header(file)
        assert header is not None, file
        for name, entry in header[0].items():
            yield name, entry["shape"]


def _header(file: Path) -> tuple[dict[str, Any], int] | None:
    """The tensor table of a safetensors file and the size the whole file must have."""
    with file.open("rb") as stream:
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
