"""Exports: a checkpoint as a Diffusers pipeline directory, or as LoRA files, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from wan_trainer.config.family import names_component, read_json_object
from wan_trainer.export.experts import TrainedExpert, write_expert
from wan_trainer.export.source import Source
from wan_trainer.export.start import StartingWeights
from wan_trainer.models.wan.adapter_files import write_adapter, write_diffusers_adapter
from wan_trainer.models.wan.directory import WanDirectory
from wan_trainer.types import UserError, first_line

PROVENANCE = "export.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True)
class Written:
    """What an export consists of: one line per part, in words."""

    out: Path
    parts: tuple[str, ...]


def export_diffusers(source: Source, base: WanDirectory, out: Path, dtype: torch.dtype | None) -> Written:
    """Write a pipeline directory that Diffusers loads: trained experts, everything else as in `base`.

    Adapters are merged into their expert, in float32. Weight files of untouched parts are hard links to the
    base's where the file system allows it, and copies elsewhere. dtype: of the trained experts, None for the
    one their base has. Raises UserError when `out` exists or cannot be written.
    """
    experts: dict[str, TrainedExpert] = {}
    kept = [name for name in base.experts if name not in source.experts or name in source.adapters]
    base_lora = source.checked_base_lora(base.experts) if kept else None
    for name in base.experts:
        needed = (source.started_from, base_lora) if name in kept else (None, None)
        start = StartingWeights(base.path / name, name, *needed)
        if name in source.experts or start.replaced:
            experts[name] = TrainedExpert(source, name, start)

    def fill(partial: Path) -> Iterator[str]:
        shutil.copyfile(base.path / "model_index.json", partial / "model_index.json")
        index = read_json_object(base.path / "model_index.json")
        for component in (name for name in index if names_component(index, name)):
            expert = experts.get(component)
            trained = _weight_names(base.path / component) if expert is not None else frozenset()
            linked = _carry(base.path / component, partial / component, leave_out=trained)
            if expert is None:
                yield f"{component}: unchanged" + (" (weights linked)" if linked else "")
                continue
            written = write_expert(partial / component, expert, dtype)
            if component in source.experts:
                merged = ", adapters merged" if component in source.adapters else ""
                if merged and base_lora is not None:
                    merged += f" after base_lora {base_lora}"
                yield f"{component}: trained{merged}{_averaged(source)}, {_name(written)}"
            else:
                yield f"{component}: not trained, {_start(source.started_from, base_lora)}, {_name(written)}"

    return _whole(out, source, fill)


def export_lora(source: Source, out: Path, dtype: torch.dtype | None) -> Written:
    """Write a directory per adapted expert: PEFT's layout, and the file Diffusers' pipelines load.

    dtype: None for the one they were trained in. Raises UserError when there are no adapters, or `out`
    exists or cannot be written.
    """
    if not source.adapters:
        raise UserError(
            f"{source.checkpoint} holds no adapters, all weights were trained: use --to diffusers"
        )

    def fill(partial: Path) -> Iterator[str]:
        for expert, config in source.adapters.items():
            names = source.state.shapes(source.section, f"{expert}.")
            tensors = source.state.read(source.section, names, f"{expert}.")
            if dtype is not None:
                tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            write_adapter(partial / expert, config, tensors)
            write_diffusers_adapter(partial / expert, config, tensors)
            written = next(iter(tensors.values())).dtype
            yield (
                f"{expert}: {len(tensors) // 2} adapters{_averaged(source)}, rank {config['r']}, "
                f"alpha {config['lora_alpha']:g}, {_name(written)}"
            )
        if source.base_lora is not None:
            yield (
                f"they apply to weights into which base_lora {source.base_lora} is merged: load that one "
                "beneath them, at scale 1"
            )

    return _whole(out, source, fill)


def _whole(out: Path, source: Source, fill: Callable[[Path], Iterator[str]]) -> Written:
    """Fill a directory beside `out` and rename it, so that `out` is complete or not there."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists: name a directory that is not there yet with --out")
    if source.checkpoint.resolve() in out.resolve().parents:
        raise UserError(f"{out} is in the checkpoint, which is to stay as it is: name another with --out")
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}.partial")
    try:
        with _storage(out):
            partial.mkdir(parents=True)
            parts = tuple(fill(partial))
            (partial / PROVENANCE).write_text(json.dumps(_provenance(source, parts), indent=1) + "\n")
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Written(out, parts)


@contextmanager
def _storage(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        raise UserError(f"{out} cannot be written ({first_line(error)}): choose another place") from error


def _provenance(source: Source, parts: tuple[str, ...]) -> dict[str, object]:
    return {
        "checkpoint": str(source.checkpoint.resolve()),
        "step": source.manifest.step,
        "weights": "averages" if source.section == "ema" else "last",
        "parts": list(parts),
    }


def _carry(component: Path, out: Path, leave_out: frozenset[str]) -> bool:
    """Bring a component's files to `out`, all but those named; whether a weight file could be linked.

    What a user may want to edit is copied: a link would change the base too.
    """
    linked = False
    for file in sorted(component.rglob("*")):
        name = file.relative_to(component)
        if (
            not file.is_file()
            or name.as_posix() in leave_out
            or any(part.startswith(".") for part in name.parts)
        ):
            continue
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = _link_or_copy(file, target) or linked
    return linked


def _link_or_copy(file: Path, target: Path) -> bool:
    if file.suffix in _WEIGHTS:
        try:
            os.link(file.resolve(), target)
            return True
        except OSError:
            pass  # another file system, or one without links
    shutil.copyfile(file, target)
    return False


def _weight_names(component: Path) -> frozenset[str]:
    """Weight files of a component, of any format, and their index: all hold the weights before training."""
    return frozenset(
        file.relative_to(component).as_posix()
        for file in component.rglob("*")
        if file.suffix in _WEIGHTS or file.name.endswith(".index.json")
    )


def _start(started_from: Path | None, base_lora: Path | None) -> str:
    """What an expert that was not trained is."""
    words = [] if started_from is None else [f"as in {started_from}"]
    return ", ".join(words if base_lora is None else [*words, f"base_lora {base_lora} merged"])


def _averaged(source: Source) -> str:
    return " (averages)" if source.section == "ema" else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
