"""Where each format keeps its samples. A row is light; its text is read when the sample is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from wan_trainer.data.descriptor import PromptListSource, VbvrSource, read_json, read_text, validated
from wan_trainer.data.layout import (
    FINAL_FRAME,
    FIRST_FRAME,
    GROUND_TRUTH,
    MAY_BE_EMPTY,
    METADATA,
    PROMPT,
    SAMPLE_FILES,
    is_safe_name,
)
from wan_trainer.types import Sample, UserError


class Row(Protocol):
    """One sample, before its text is read."""

    @property
    def task(self) -> str:
        """The task the sample belongs to."""
        ...

    @property
    def sample_id(self) -> str:
        """task/id."""
        ...

    def sample(self) -> Sample:
        """The sample; UserError when its text cannot be read."""
        ...

    def missing_files(self) -> list[Path]:
        """Files it names that do not exist or are empty."""
        ...


@dataclass(frozen=True)
class VbvrRow:
    """A sample of the materialised layout; 50,000 prompts are not read when a run starts, but when needed."""

    task: str
    name: str
    root: Path

    @property
    def sample_id(self) -> str:
        """task/id."""
        return f"{self.task}/{self.name}"

    @property
    def directory(self) -> Path:
        """The directory of the sample's files."""
        return self.root / self.task / self.name

    def sample(self) -> Sample:
        """Read the prompt; surrounding white space is no part of it."""
        directory = self.directory
        return Sample(
            sample_id=self.sample_id,
            task=self.task,
            prompt=read_text(directory / PROMPT).strip(),
            first_frame=directory / FIRST_FRAME,
            ground_truth_video=directory / GROUND_TRUTH,
            final_frame=directory / FINAL_FRAME,
            metadata=directory / METADATA,
        )

    def missing_files(self) -> list[Path]:
        """Files of the layout that do not exist or are empty."""
        return [
            path
            for name in SAMPLE_FILES
            if not _is_there(path := self.directory / name, may_be_empty=name in MAY_BE_EMPTY)
        ]


@dataclass(frozen=True)
class PromptRow:
    """A prompt of a list, with the media it names."""

    content: Sample

    @property
    def task(self) -> str:
        """The name of the list, or what the line says."""
        return self.content.task

    @property
    def sample_id(self) -> str:
        """task/id."""
        return self.content.sample_id

    def sample(self) -> Sample:
        """The sample."""
        return self.content

    def missing_files(self) -> list[Path]:
        """Media that do not exist or are empty."""
        media = (self.content.first_frame, self.content.ground_truth_video)
        return [path for path in media if path is not None and not _is_there(path, may_be_empty=False)]


class _ManifestEntry(BaseModel):
    """One task of a split manifest. Its lists of sample ids are the extra keys, named by split."""

    model_config = ConfigDict(extra="allow", strict=True)

    task: str
    split: str | None = None


_MANIFEST: TypeAdapter[list[_ManifestEntry]] = TypeAdapter(list[_ManifestEntry])
_IDS: TypeAdapter[list[str]] = TypeAdapter(list[str])


def vbvr_rows(source: VbvrSource, base: Path) -> Iterator[VbvrRow]:
    """Rows in manifest order; of several data roots the first that holds the sample's directory wins."""
    path = base / source.split_manifest
    entries = validated(_MANIFEST, read_json(path), path)
    allowed = source.allowed_task_splits
    chosen = [entry for entry in entries if allowed is None or entry.split in allowed]
    if not chosen:
        present = sorted({str(entry.split) for entry in entries})
        raise UserError(f"{path}: no task has a split of allowed_task_splits {allowed}; it holds {present}")
    roots = [base / root for root in source.data_roots]
    for entry in chosen:
        lists = entry.model_extra or {}
        if source.split not in lists:
            raise UserError(
                f"{path}: task {entry.task!r} has no list {source.split!r}; split is one of {sorted(lists)}"
            )
        ids = validated(_IDS, lists[source.split], path, f"task {entry.task!r}, {source.split}")
        unsafe = [name for name in (entry.task, *ids) if not is_safe_name(name)]
        if unsafe:
            raise UserError(
                f"{path}: {unsafe[0]!r} cannot name a directory; use letters, digits, '_', '-', '.'"
            )
        for name in ids:
            yield VbvrRow(entry.task, name, _root_of(roots, entry.task, name))


def _root_of(roots: Sequence[Path], task: str, name: str) -> Path:
    if len(roots) == 1:
        return roots[0]
    return next((root for root in roots if (root / task / name).is_dir()), roots[0])


class _Line(BaseModel):
    """One line of a .jsonl prompt list. Paths are relative to the list."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    image: str | None = Field(default=None, min_length=1)
    reference_video: str | None = Field(default=None, min_length=1)
    negative_prompt: str | None = None
    id: str | None = None
    task: str | None = None


_LINE: TypeAdapter[_Line] = TypeAdapter(_Line)


def prompt_list_rows(source: PromptListSource, base: Path) -> Iterator[PromptRow]:
    """Rows in file order. The default id is the number of the line, from 0, in eight digits."""
    path = base / source.path
    task = path.stem if source.task is None else source.task
    if path.suffix == ".txt":
        lines = ((number, _Line(prompt=text)) for number, text in _lines(path))
    elif path.suffix == ".jsonl":
        lines = ((number, _parse_line(path, number, text)) for number, text in _lines(path) if text.strip())
    else:
        raise UserError(f"{path}: a prompt list is a .txt or a .jsonl file; rename or convert it")
    for number, line in lines:
        row_task, name = line.task or task, line.id or f"{number:08d}"
        for part in (row_task, name):
            if not is_safe_name(part):
                raise UserError(
                    f"{path}: line {number + 1}: {part!r} cannot be a task or an id; "
                    "use letters, digits, '_', '-', '.' (key `task` of the source renames the list)"
                )
        yield PromptRow(
            Sample(
                sample_id=f"{row_task}/{name}",
                task=row_task,
                prompt=line.prompt.strip(),
                first_frame=path.parent / line.image if line.image else None,
                ground_truth_video=path.parent / line.reference_video if line.reference_video else None,
                negative_prompt=line.negative_prompt,
            )
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    # str.splitlines would also split at U+2028 and other separators that may stand inside a prompt.
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    for number, text in enumerate(lines):
        yield number, text.removesuffix("\r")


def _parse_line(path: Path, number: int, text: str) -> _Line:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {number + 1}: not JSON ({error}); one object a line") from error
    return validated(_LINE, value, path, f"line {number + 1}")


def _is_there(path: Path, *, may_be_empty: bool) -> bool:
    return path.is_file() and (may_be_empty or path.stat().st_size > 0)
