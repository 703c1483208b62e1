"""Prompt lists: a .txt with a prompt a line, or a .jsonl with an object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from wan_trainer.config.suggest import suggest
from wan_trainer.data.descriptor import capped, read_text, short
from wan_trainer.data.layout import is_safe_name
from wan_trainer.types import Sample, UserError, first_line

SUFFIXES = (".txt", ".jsonl")
_KEYS = ("prompt", "image", "reference_video", "negative_prompt", "id", "task")
_MEDIA = ("image", "reference_video")
_NAME_RULE = "use letters, digits, '_', '-', '.' and '+', and no dot at the start"


@dataclass(frozen=True)
class PromptRow:
    """A prompt with the media it names, and the line of the list it stands on (from 1)."""

    content: Sample
    list_path: Path
    line: int

    @property
    def task(self) -> str:
        """The name of the list, or what the line says."""
        return self.content.task

    @property
    def sample_id(self) -> str:
        """task/id."""
        return self.content.sample_id

    @property
    def has_image(self) -> bool:
        """Whether the line names a first frame."""
        return self.content.first_frame is not None

    @property
    def has_ground_truth(self) -> bool:
        """False: a reference video is no answer to a task."""
        return False

    def sample(self) -> Sample:
        """The sample."""
        return self.content

    def missing_files(self) -> list[str]:
        """One line for each media file that does not exist or is empty."""
        media = (self.content.first_frame, self.content.reference_video)
        return [
            f"{self.list_path}:{self.line}: {key} {path}, missing or empty; correct the path (it is relative "
            "to the list) or add the file"
            for key, path in zip(_MEDIA, media, strict=True)
            if path is not None and not (path.is_file() and path.stat().st_size)
        ]


def read_prompts(path: Path) -> tuple[Sample, ...]:
    """The samples of a prompt list in file order, every media file there.

    Either all of them have a first frame or none has. Raises UserError with one line per problem.
    """
    rows, problems = prompt_rows(path)
    problems += [line for row in rows for line in row.missing_files()]
    if problems:
        raise UserError(*capped(problems, path))
    return tuple(row.content for row in rows)


def prompt_rows(path: Path, task: str | None = None) -> tuple[list[PromptRow], list[str]]:
    """(the rows in file order, one line for each thing that is wrong with the list); opens no media file.

    task: what the sample ids start with where a line does not say it, else the file's stem. The default id is
    the number of the line, from 0, in eight digits. Raises UserError when the list itself cannot be read.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: a prompt list is a .txt or a .jsonl file; rename or convert it")
    path = path.absolute()
    task = path.stem if task is None else task
    rows: list[PromptRow] = []
    problems: list[str] = []
    for number, text in _lines(path):
        entry, found = ({"prompt": text}, []) if path.suffix == ".txt" else _entry(text)
        if found:
            problems += [f"{path}:{number}: {line}" for line in found]
        else:
            sample = _sample(entry, path.parent, task, f"{number - 1:08d}")
            rows.append(PromptRow(sample, path, number))
    if not rows and not problems:
        problems.append(f"{path}: holds no prompt; write one a line")
    if not is_safe_name(task) and any(row.task == task for row in rows):
        problems.append(
            f"{path}: {task!r}, no name for a task, which a list's name is unless it is given; {_NAME_RULE}"
        )
    return rows, [*problems, *_twice(rows), *_mixed(rows, path)]


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """(number from 1, text) of the lines that are not blank."""
    # str.splitlines would also split at U+2028 and other separators that may stand inside a prompt.
    for number, text in enumerate(read_text(path).split("\n"), start=1):
        if text.strip():
            yield number, text


def _entry(text: str) -> tuple[Mapping[str, str], list[str]]:
    """The keys of a .jsonl line that are not null, and what is wrong with them."""
    try:
        value: Any = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        return {}, [f"{short(text)}, not JSON ({error.msg}, column {error.colno}); write one object a line"]
    except (ValueError, RecursionError) as error:
        return {}, [f"{short(text)}, not readable JSON ({first_line(error)}); write one object a line"]
    if not isinstance(value, dict):
        return {}, [f"{short(text)}, not a JSON object; write one object a line"]
    entry = {key: item for key, item in cast("dict[str, Any]", value).items() if item is not None}
    problems = [
        f"{key!r}, unknown key; use one of {', '.join(_KEYS)}{suggest(key, _KEYS)}"
        for key in entry
        if key not in _KEYS
    ]
    problems += [
        f"{key}: {short(item)}, not text; put it in quotation marks"
        for key, item in entry.items()
        if key in _KEYS and not isinstance(item, str)
    ]
    problems += [
        f"{key}: empty, names no file; name one or leave the key out"
        for key in _MEDIA
        if entry.get(key) == ""
    ]
    texts = {key: item for key, item in entry.items() if key in _KEYS and isinstance(item, str)}
    problems += [
        f"{key}: {short(text)}, half of a surrogate pair, which is no character; write the text as UTF-8"
        for key, text in texts.items()
        if any("\ud800" <= character <= "\udfff" for character in text)
    ]
    problems += [
        f"{key}: {texts[key]!r}, no name for a sample or a task; {_NAME_RULE}"
        for key in ("id", "task")
        if key in texts and not is_safe_name(texts[key])
    ]
    if "prompt" not in entry:
        problems.append(f"{short(text)}, has no prompt; add the key")
    return texts, problems


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises ValueError for a key that stands twice: json would drop the first."""
    entry: dict[str, Any] = {}
    for key, value in pairs:
        if key in entry:
            raise ValueError(f"{key!r} stands twice")
        entry[key] = value
    return entry


def _sample(entry: Mapping[str, str], folder: Path, task: str, name: str) -> Sample:
    task, name = entry.get("task", task), entry.get("id", name)
    image, reference = (entry.get(key) for key in _MEDIA)
    return Sample(
        sample_id=f"{task}/{name}",
        task=task,
        prompt=entry["prompt"].strip(),
        first_frame=None if image is None else folder / image,
        reference_video=None if reference is None else folder / reference,
        negative_prompt=entry.get("negative_prompt"),
    )


def _twice(rows: Sequence[PromptRow]) -> list[str]:
    first: dict[str, int] = {}
    return [
        f"{row.list_path}:{row.line}: {row.sample_id}, the sample id of line {first[row.sample_id]} too; "
        "give one of them another id"
        for row in rows
        if first.setdefault(row.sample_id, row.line) != row.line
    ]


def _mixed(rows: Sequence[PromptRow], path: Path) -> list[str]:
    """A batch is conditioned on first frames or it is not."""
    with_image = [row.line for row in rows if row.has_image]
    without = [row.line for row in rows if not row.has_image]
    if not with_image or not without:
        return []
    return [
        f"{path}: {len(with_image)} prompts have an image (first: line {with_image[0]}) and {len(without)} "
        f"have none (first: line {without[0]}); give every prompt one, or none, or make two lists"
    ]
