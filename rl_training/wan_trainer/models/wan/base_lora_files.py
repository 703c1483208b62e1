"""Which file of `base_lora` is merged into which expert.

Torch-free: preflight and the loader ask the same questions here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from wan_trainer.digests import file_sha256, text_sha256
from wan_trainer.models.wan.weight_files import damage
from wan_trainer.types import UserError

SUFFIX = ".safetensors"
SHA256_KEY = "base_lora_sha256"
"""Its name among the contract values of a run."""
PEFT_CONFIG = "adapter_config.json"
# As few-step adapters of two-expert models are published.
_PUBLISHED = {"transformer": "high_noise_model.safetensors", "transformer_2": "low_noise_model.safetensors"}
# Of a directory that holds an adapter in both layouts, Diffusers' file tells its alpha itself.
_KNOWN = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")


def base_lora_file(path: Path, expert: str) -> Path | None:
    """The file of `path` that is merged into `expert`; None when it has none for this expert.

    A directory with something for each expert (`transformer/` and `transformer_2/`, or
    high_noise_model.safetensors and low_noise_model.safetensors) leaves out those it does not name. A single
    file, or a directory of one, is for every expert. Raises UserError when a directory does not tell.
    """
    named = _named(path)
    if named:
        part = named.get(expert)
        return _only_file(part) if part is not None and part.is_dir() else part
    return _only_file(path) if path.is_dir() else path


def check_base_lora(path: Path, experts: Sequence[str]) -> list[str]:
    """What is wrong with the files of `path` for a model with these experts, one line each."""
    if not path.exists():
        return [f"base_lora: {path} does not exist: put the adapter there, or set --base_lora null"]
    foreign = [part for expert, part in _named(path).items() if expert not in experts]
    if foreign:
        return [
            f"base_lora: {foreign[0]} is for an expert that the model has not ({', '.join(experts)}): name "
            "the file for its expert"
        ]
    lines: list[str] = []
    for file in _files(path, experts, lines):
        if file.suffix != SUFFIX:
            lines.append(f"base_lora: {file} is no {SUFFIX} file: convert it")
        elif (problem := damage(file)) is not None:
            lines.append(f"base_lora: {problem}: fetch it again")
    return list(dict.fromkeys(lines))


def base_lora_sha256(path: Path, experts: Sequence[str]) -> str:
    """One digest of all that is merged into these experts, wherever it lies.

    Raises UserError with the lines of `check_base_lora`.
    """
    problems = check_base_lora(path, experts)
    if problems:
        raise UserError(*problems)
    files = {expert: file for expert in experts if (file := base_lora_file(path, expert)) is not None}
    digests = {file: _digest(file) for file in set(files.values())}
    return text_sha256(json.dumps({expert: digests[file] for expert, file in files.items()}, sort_keys=True))


def base_lora_identity(model_path: Path, base_lora: Path | None) -> dict[str, str]:
    """What a resumed run must share of the adapter beside its path; nothing without one.

    Raises UserError with the lines of `check_base_lora`.
    """
    if base_lora is None:
        return {}
    experts = [expert for expert in _PUBLISHED if (model_path / expert).is_dir()]
    return {SHA256_KEY: base_lora_sha256(base_lora, experts or list(_PUBLISHED)[:1])}


def _digest(file: Path) -> list[str]:
    """Of an adapter and, in PEFT's layout, of the file that holds its alpha."""
    config = file.parent / PEFT_CONFIG
    return [file_sha256(part) for part in (file, config) if part.is_file()]


def _files(path: Path, experts: Sequence[str], lines: list[str]) -> list[Path]:
    """The files of the experts; what a directory does not tell is added to `lines`."""
    files: list[Path] = []
    for expert in experts:
        try:
            file = base_lora_file(path, expert)
        except UserError as error:
            lines += error.problems
            continue
        files += [] if file is None else [file]
    return files


def _named(path: Path) -> dict[str, Path]:
    """The parts of a directory that name their expert."""
    directories = {expert: path / expert for expert in _PUBLISHED if (path / expert).is_dir()}
    return directories or {
        expert: path / name for expert, name in _PUBLISHED.items() if (path / name).is_file()
    }


def _only_file(directory: Path) -> Path:
    for name in _KNOWN:
        if (directory / name).is_file():
            return directory / name
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)} {SUFFIX} files" if files else f"no {SUFFIX} file"
    raise UserError(
        f"base_lora: {directory} holds {found}: name one file, or a directory with one in each of "
        f"{' and '.join(_PUBLISHED)}"
    )
