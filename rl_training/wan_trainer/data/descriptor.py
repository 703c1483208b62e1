"""dataset.json: the list of sources a run draws from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from wan_trainer.types import UserError

PROBLEMS_SHOWN = 20
FileChecks = Literal["all", "sample", "none"]
_SPELLINGS = {True: "all", False: "none"}


def _as_file_checks(value: object) -> object:
    return _SPELLINGS[value] if isinstance(value, bool) else value


class _Source(BaseModel):
    """What every source may say.

    check_files: which samples' files are looked for when the data set is opened: all, sample (the first and
    the last sample of every task) or none. The video shape is a note for readers: the run's config always
    wins.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    check_files: Annotated[FileChecks, BeforeValidator(_as_file_checks)] = "sample"
    num_frames: int | None = Field(default=None, ge=1)
    height: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    fps: float | None = Field(default=None, gt=0)


class VbvrSource(_Source):
    """Samples of the materialised layout. Paths are relative to dataset.json.

    split: the key of an entry of the manifest that lists sample ids. allowed_task_splits: which entries
    count.
    """

    format: Literal["vbvr_pro"]
    split_manifest: str = Field(min_length=1)
    data_roots: list[str] = Field(min_length=1)
    split: str = "rl"
    allowed_task_splits: list[str] | None = None


class PromptListSource(_Source):
    """A .txt (a prompt a line) or .jsonl. task: what its sample ids start with, else the file's stem."""

    format: Literal["prompt_list"]
    path: str = Field(min_length=1)
    task: str | None = None


Source = VbvrSource | PromptListSource
_SOURCES: TypeAdapter[list[Source]] = TypeAdapter(list[Annotated[Source, Field(discriminator="format")]])


def read_descriptor(path: Path) -> list[Source]:
    """The sources of a dataset.json. Raises UserError with one line per problem."""
    if not path.exists():
        raise UserError(
            f"dataset_json: {path}: No such file; name another, or make it with wan-trainer unpack"
        )
    sources = validated(_SOURCES, read_json(path), path)
    if not sources:
        raise UserError(f"{path}: lists no source; run wan-trainer unpack or add one (docs/data.md)")
    return sources


def read_json(path: Path) -> Any:
    """The JSON document at `path`; UserError when it is missing or is no JSON."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not JSON ({error}); mend that line or run wan-trainer unpack again"
        ) from error


def read_text(path: Path) -> str:
    """The UTF-8 text at `path`, without a byte order mark; UserError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}); save the file as UTF-8") from error
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; check the path (wan-trainer unpack writes a dataset.json)"
        ) from error


def validated[T](adapter: TypeAdapter[T], value: object, where: Path, prefix: str = "") -> T:
    """`value` as T, or UserError with one line per problem: the file, the place, the rule, the value."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        lines = [
            f"{where}: {_place(prefix, problem['loc'])}{problem['msg']} (given: {short(problem['input'])})"
            for problem in error.errors(include_url=False)
        ]
        raise UserError(*(f"{line}; see docs/data.md" for line in lines)) from error


def capped(problems: Sequence[str], path: Path) -> list[str]:
    """The first lines, and how many more there are."""
    shown = list(problems[:PROBLEMS_SHOWN])
    if len(problems) > len(shown):
        shown.append(f"{path}: and {len(problems) - len(shown)} more problems like these")
    return shown


def _place(prefix: str, location: Sequence[int | str]) -> str:
    parts = [prefix] if prefix else []
    parts += [f"entry {part}" if isinstance(part, int) else part for part in location]
    return ", ".join(parts) + ": " if parts else ""


def short(value: object) -> str:
    """A value as a message quotes it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
