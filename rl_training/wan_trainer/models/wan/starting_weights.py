"""Weights a run starts from in place of its model directory's: a Diffusers directory, or safetensors files.

Torch-free: preflight and the loader ask the same questions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wan_trainer.models.wan.weight_files import damage, weight_files

_SUFFIX = ".safetensors"
_ONE_EXPERT = "transformer"


def starting_component(path: Path, expert: str) -> Path | None:
    """What holds an expert's weights: a component directory of `path`, or `path` itself for its only expert.

    None when `path` leaves this expert to the model directory.
    """
    if (path / expert).is_dir():
        return path / expert
    return path if expert == _ONE_EXPERT and not (path / _ONE_EXPERT).is_dir() else None


def starting_files(component: Path) -> list[Path]:
    """The safetensors files of a component, of a directory that holds only such files, or of one file.

    Raises ValueError for an index that names none.
    """
    if component.is_file():
        return [component]
    return weight_files(component) or sorted(component.glob(f"*{_SUFFIX}"))


def check_starting_weights(path: Path, experts: Sequence[str]) -> list[str]:
    """What is wrong with `path` as the start of a model with these experts, one line each."""
    if not path.exists():
        return [f"resume_from: {path} does not exist: set another --resume_from, or null to start afresh"]
    if path.is_file() and path.suffix != _SUFFIX:
        return [f"resume_from: {path} is no {_SUFFIX} file: convert it, or name a Diffusers directory"]
    components = [part for expert in experts if (part := starting_component(path, expert)) is not None]
    if path in components and len(experts) > 1:
        return [
            f"resume_from: {path} does not say which of {len(experts)} experts it is for: name a directory "
            f"with {' and '.join(experts)} in it"
        ]
    lines: list[str] = []
    for component in components:
        try:
            files = starting_files(component)
        except ValueError as error:
            lines.append(f"resume_from: {error}: fetch it again")
            continue
        if not files:
            lines.append(
                f"resume_from: {component} holds neither a checkpoint of a run nor {_SUFFIX} files: name a "
                "checkpoint-<step> directory, a Diffusers directory, or safetensors"
            )
        for file in files:
            problem = damage(file) if file.is_file() else f"{file} is missing, its shard index names it"
            if problem is not None:
                lines.append(f"resume_from: {problem}: fetch it again")
    return lines
