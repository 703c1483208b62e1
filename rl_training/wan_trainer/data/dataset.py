"""The data set of a run: an ordered, immutable sequence of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import overload

from wan_trainer.config.specs import DataSpec
from wan_trainer.data.descriptor import FileChecks, PromptListSource, Source, read_descriptor
from wan_trainer.data.rows import Row, prompt_list_rows, vbvr_rows
from wan_trainer.digests import file_sha256
from wan_trainer.types import Sample, UserError

PROBLEMS_SHOWN = 10


class Dataset(Sequence[Sample]):
    """Samples in the order of dataset.json's sources and their manifests.

    tasks: the names of all tasks, each once, in that order. digests: sha256 of every file that defines the
    data set (dataset.json, manifests, prompt lists), by its name.
    """

    def __init__(self, rows: Sequence[Row], digests: Mapping[str, str]) -> None:
        self._rows = tuple(rows)
        self.tasks = tuple(dict.fromkeys(row.task for row in self._rows))
        self.digests = dict(digests)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [row.sample() for row in self._rows[index]]
        return self._rows[index].sample()

    def sample_ids(self) -> list[str]:
        """The ids in order; reads no file."""
        return [row.sample_id for row in self._rows]

    def sample_tasks(self) -> list[str]:
        """The task of each sample in order; reads no file."""
        return [row.task for row in self._rows]


def load_dataset(spec: DataSpec) -> Dataset:
    """Open the data set that spec.dataset_json describes.

    Raises UserError for a malformed description, missing files (as each source's check_files says), a
    sample id that occurs twice, and a size other than spec.dataset_size.
    """
    path = spec.dataset_json
    rows: list[Row] = []
    definitions = [path]
    problems: list[str] = []
    for source in read_descriptor(path):
        source_rows, definition = _rows_of(source, path.parent)
        problems.extend(_missing(_to_check(source_rows, source.check_files)))
        rows.extend(source_rows)
        definitions.append(definition)
    problems.extend(_duplicates(rows, path))
    if not rows:
        problems.append(f"{path}: its sources hold no sample; check split and the manifests")
    elif spec.dataset_size is not None and spec.dataset_size != len(rows):
        problems.append(
            f"dataset_size {spec.dataset_size}: {path} lists {len(rows)} samples; "
            f"set dataset_size to {len(rows)} or null, or complete the data set"
        )
    if problems:
        raise UserError(*_capped(problems, path))
    return Dataset(rows, {_label(file, path.parent): file_sha256(file) for file in definitions})


def _rows_of(source: Source, base: Path) -> tuple[Sequence[Row], Path]:
    """(the rows of a source, the file that lists them)."""
    if isinstance(source, PromptListSource):
        return list(prompt_list_rows(source, base)), base / source.path
    return list(vbvr_rows(source, base)), base / source.split_manifest


def _to_check(rows: Sequence[Row], check_files: FileChecks) -> Iterable[Row]:
    if check_files == "none":
        return ()
    if check_files == "all":
        return rows
    first: dict[str, Row] = {}
    last: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.task, row)
        last[row.task] = row
    return {row.sample_id: row for row in (*first.values(), *last.values())}.values()


def _missing(rows: Iterable[Row]) -> list[str]:
    return [
        f"{path}: missing or empty, sample {row.sample_id} needs it; run wan-trainer unpack or mend the list"
        for row in rows
        for path in row.missing_files()
    ]


def _duplicates(rows: Sequence[Row], path: Path) -> list[str]:
    seen: set[str] = set()
    twice = dict.fromkeys(row.sample_id for row in rows if row.sample_id in seen or seen.add(row.sample_id))
    return [
        f"{path}: sample id {name} occurs twice; drop one, or give the prompt list another `task`"
        for name in twice
    ]


def _capped(problems: Sequence[str], path: Path) -> list[str]:
    shown = list(problems[:PROBLEMS_SHOWN])
    if len(problems) > len(shown):
        shown.append(f"{path}: and {len(problems) - len(shown)} more problems like these")
    return shown


def _label(file: Path, base: Path) -> str:
    return str(file.relative_to(base)) if file.is_relative_to(base) else str(file)
