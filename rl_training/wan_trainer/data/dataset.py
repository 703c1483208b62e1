"""The data set of a run: an ordered, immutable sequence of samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from wan_trainer.config.specs import DataSpec, EvalSpec
from wan_trainer.data.descriptor import FileChecks, PromptListSource, Source, capped, read_descriptor
from wan_trainer.data.prompt_list import SUFFIXES, prompt_rows
from wan_trainer.data.rows import Row, vbvr_rows
from wan_trainer.digests import file_sha256, text_sha256
from wan_trainer.types import Sample, UserError

HELD = "eval_dataset_json"
"""The configuration key that names the held prompts."""


class Dataset(Sequence[Sample]):
    """Samples in the order of dataset.json's sources and their manifests, or of a prompt list.

    tasks: the names of all tasks, each once, in that order. digests: sha256 of every file that defines the
    data set (dataset.json, manifests, prompt lists), by its name. sha256: one of them all.
    """

    def __init__(self, rows: Sequence[Row], digests: Mapping[str, str]) -> None:
        self._rows = tuple(rows)
        self.tasks = tuple(dict.fromkeys(row.task for row in self._rows))
        self.digests = dict(digests)
        self.sha256 = text_sha256(json.dumps(self.digests, sort_keys=True))

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

    def first(self, size: int) -> Dataset:
        """The first `size` samples as a data set of the same files."""
        return Dataset(self._rows[:size], self.digests)

    def without_image(self) -> list[str]:
        """The ids of the samples that have no first frame; reads no file."""
        return [row.sample_id for row in self._rows if not row.has_image]

    def without_ground_truth(self) -> list[str]:
        """The ids of the samples that a rule reward cannot score; reads no file."""
        return [row.sample_id for row in self._rows if not row.has_ground_truth]


def load_dataset(spec: DataSpec, key: str = "dataset_json") -> Dataset:
    """Open the data set that spec.dataset_json describes, or that is this prompt list.

    key: the configuration key that names the file, for messages. Raises UserError for a malformed
    description, missing files (as each source's check_files says), a sample id that occurs twice, and a size
    other than spec.dataset_size.
    """
    path = spec.dataset_json
    rows: list[Row] = []
    definitions = [path]
    problems: list[str] = []
    for source in _sources(path, key):
        source_rows, definition, wrong = _rows_of(source, path.parent)
        problems.extend(wrong)
        for row in _to_check(source_rows, source.check_files):
            problems.extend(row.missing_files())
        rows.extend(source_rows)
        definitions.append(definition)
    # Of a line that is refused there is no row: what is said below would be about another data set.
    if not problems:
        problems.extend(_duplicates(rows, path))
        problems.extend(_wrong_size(rows, path, spec.dataset_size))
    if problems:
        raise UserError(*capped(problems, path))
    return Dataset(rows, {_label(file, path.parent): file_sha256(file) for file in definitions})


def load_held(spec: DataSpec, evaluation: EvalSpec) -> Dataset:
    """The held prompts of an evaluation, as many as it takes. Raises UserError like `load_dataset`."""
    path, size = evaluation.dataset_json, evaluation.size
    dataset = load_dataset(replace(spec, dataset_json=path, dataset_size=None), HELD)
    if size is None:
        return dataset
    if size > len(dataset):
        raise UserError(f"eval_size: {size}, and {path} lists {len(dataset)} samples; use fewer, or null")
    return dataset.first(size)


def check_ground_truth(dataset: Dataset, key: str = "dataset_json") -> None:
    """Raise UserError when a sample has nothing that a rule reward could compare a rollout with."""
    without = dataset.without_ground_truth()
    if without:
        raise UserError(
            f"{key}: {len(without)} of {len(dataset)} samples have no ground truth (first: "
            f"{without[0]}), which vbvr_rule compares with; use unpacked archives (a prompt list has none), "
            "or another grpo_reward_fn"
        )


def _sources(path: Path, key: str) -> list[Source]:
    """The sources that a file is or lists, by its suffix."""
    if path.suffix == ".json":
        return list(read_descriptor(path))
    if path.suffix in SUFFIXES:
        return [PromptListSource(format="prompt_list", path=path.name, check_files="all")]
    raise UserError(
        f"{key}: {path}, neither a descriptor (.json) nor a prompt list (.txt, .jsonl); name one, or "
        "rename the file"
    )


def _rows_of(source: Source, base: Path) -> tuple[Sequence[Row], Path, list[str]]:
    """(the rows of a source, the file that lists them, what is wrong with it)."""
    if isinstance(source, PromptListSource):
        rows, problems = prompt_rows(base / source.path, source.task)
        return rows, base / source.path, problems
    return list(vbvr_rows(source, base)), base / source.split_manifest, []


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


def _wrong_size(rows: Sequence[Row], path: Path, size: int | None) -> list[str]:
    if not rows:
        return [f"{path}: its sources hold no sample; check split and the manifests"]
    if size is None or size == len(rows):
        return []
    return [
        f"dataset_size {size}: {path} lists {len(rows)} samples; "
        f"set dataset_size to {len(rows)} or null, or complete the data set"
    ]


def _duplicates(rows: Sequence[Row], path: Path) -> list[str]:
    seen: set[str] = set()
    twice = dict.fromkeys(row.sample_id for row in rows if row.sample_id in seen or seen.add(row.sample_id))
    return [
        f"{path}: sample id {name} occurs twice; drop one, or give the prompt list another `task`"
        for name in twice
    ]


def _label(file: Path, base: Path) -> str:
    return str(file.relative_to(base)) if file.is_relative_to(base) else str(file)
