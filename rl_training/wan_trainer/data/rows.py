"""Where unpacked archives keep their samples. A row is light; its text is read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, TypeAdapter

from wan_trainer.data.descriptor import VbvrSource, read_json, read_text, validated
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

    @property
    def has_image(self) -> bool:
        """Whether it has a first frame."""
        ...

    @property
    def has_ground_truth(self) -> bool:
        """Whether it has what a rule reward compares with."""
        ...

    def missing_files(self) -> list[str]:
        """One line for each file it names that does not exist or is empty."""
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
    def has_image(self) -> bool:
        """True: the layout has one."""
        return True

    @property
    def has_ground_truth(self) -> bool:
        """True: the layout has one."""
        return True

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

    def missing_files(self) -> list[str]:
        """One line for each file of the layout that does not exist or is empty."""
        return [
            f"{path}: missing or empty, sample {self.sample_id} needs it; run wan-trainer unpack again"
            for name in SAMPLE_FILES
            if not _is_there(path := self.directory / name, may_be_empty=name in MAY_BE_EMPTY)
        ]


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


def _is_there(path: Path, *, may_be_empty: bool) -> bool:
    return path.is_file() and (may_be_empty or path.stat().st_size > 0)
