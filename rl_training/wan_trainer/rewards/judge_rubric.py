"""What a judge is told to look for: a rubric a task from a pinned directory, or our own generic one."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import cast

import yaml

from wan_trainer.config.specs import VlmRewardSpec
from wan_trainer.digests import files_sha256
from wan_trainer.rewards.evalkit import match_tasks
from wan_trainer.types import UserError

SUFFIXES = (".md", ".txt")
LARGEST = 256 * 1024
"""Largest rubric in bytes: it is sent with every rollout."""

GENERIC = "generic"
SCORE, FAILED = "score", "failed"
"""Components of every verdict; no criterion may take their names."""

CUSTOM = "--vlm_reward_prompt_mode custom"
_FENCE = "---"
_MOST = sys.float_info.max


@dataclass(frozen=True)
class Rubric:
    """A task's rubric. criteria: name -> weight, the most it can earn; empty where only a total is asked."""

    name: str
    text: str
    criteria: Mapping[str, float] = field(default_factory=dict[str, float])


def rubrics_sha256(directory: Path) -> str:
    """The digest that pins a rubric directory, 64 hexadecimal characters.

    Over every file below it that is not hidden, sorted by path, in the record form of `digests.files_sha256`.
    Raises UserError when it is no directory.
    """
    if not directory.is_dir():
        raise UserError(
            f"vlm_reward_prompt_dir: {directory} is no directory; put the rubrics there, a file a task, or "
            f"use {CUSTOM}"
        )
    return files_sha256((path.relative_to(directory).as_posix(), path) for path in _files(directory))


def load_rubrics(spec: VlmRewardSpec, tasks: Collection[str]) -> dict[str, Rubric]:
    """The rubric of every task of the dataset.

    Raises UserError with everything that is wrong: the directory is not the pinned one, a task has no rubric,
    a rubric cannot be used, or a weighted score is no criterion of it.
    """
    if spec.prompt_mode == "custom":
        rubric = generic_rubric(spec.score_max)
        found = dict.fromkeys(tasks, rubric)
    else:
        found = _task_rubrics(spec, tasks)
    problems = [line for rubric in _distinct(found) for line in _unknown_weights(spec, rubric)]
    if problems:
        raise UserError(*problems)
    return found


def generic_rubric(score_max: float) -> Rubric:
    """Our own rubric of 100 points, for any task. Raises UserError when the full mark is another."""
    text = files("wan_trainer.rewards").joinpath(f"rubrics/{GENERIC}.md").read_text(encoding="utf-8")
    return parse_rubric(GENERIC, text, score_max)


def parse_rubric(name: str, text: str, score_max: float) -> Rubric:
    """A rubric from its file's text: what is sent, after an optional head that lists weighted criteria.

    Raises UserError when the text is empty, the head is not `criteria: {name: weight}`, or the weights do not
    sum to the full mark.
    """
    head, body = _split(name, text)
    criteria = _criteria(name, head)
    if not body.strip():
        raise UserError(f"rubric {name}: is empty; write what the judge should look for")
    total = math.fsum(criteria.values())
    if criteria and not math.isclose(total, score_max, rel_tol=1e-9):
        raise UserError(
            f"rubric {name}: the weights of its criteria sum to {total:g}, vlm_reward_score_max is "
            f"{score_max:g}; make them equal"
        )
    return Rubric(name, body.strip(), criteria)


def _split(name: str, text: str) -> tuple[str, str]:
    """The head between two lines of three dashes, and the rest."""
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].strip() != _FENCE:
        return "", text
    ends = [index for index, line in enumerate(lines) if index and line.strip() == _FENCE]
    if not ends:
        raise UserError(f"rubric {name}: its head has no closing line {_FENCE}; add it")
    return "\n".join(lines[1 : ends[0]]), "\n".join(lines[ends[0] + 1 :])


def _criteria(name: str, head: str) -> dict[str, float]:
    wrong = UserError(
        f"rubric {name}: its head must be `criteria:` with a positive weight for each name, none of them "
        f"{SCORE} or {FAILED}; mend or remove the head"
    )
    try:
        parsed: object = yaml.safe_load(head) if head.strip() else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: what looks like a date and is none
        raise wrong from None
    if not isinstance(parsed, dict) or not parsed.keys() <= {"criteria"}:
        raise wrong
    given: object = parsed.get("criteria", {})
    if not isinstance(given, dict):
        raise wrong
    criteria: dict[str, float] = {}
    for key, weight in cast("dict[object, object]", given).items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MOST:
            raise wrong
        if not isinstance(key, str) or not key.strip() or key in (SCORE, FAILED):
            raise wrong
        criteria[key] = float(weight)
    return criteria


def _task_rubrics(spec: VlmRewardSpec, tasks: Collection[str]) -> dict[str, Rubric]:
    directory = spec.prompt_dir
    assert directory is not None, "`config.contradictions` requires it"
    problems = _check_pin(directory, spec.prompt_sha256)
    paths: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in SUFFIXES and path.is_file() and not path.name.startswith("."):
            if path.stem in paths:
                problems.append(f"rubric {path.stem}: {paths[path.stem].name} and {path.name}; keep one")
            paths[path.stem] = path
    names = match_tasks(tasks, paths)
    if names.unknown:
        shown = [f"{task} (nearest: {near})" if near else task for task, near in names.unknown.items()]
        more = f", and {len(shown) - 8} more" if len(shown) > 8 else ""
        problems.append(
            f"vlm_reward_prompt_dir: {directory} has no rubric for {len(shown)} of the dataset's tasks: "
            f"{', '.join(shown[:8])}{more}; add <task>.md for each, or use {CUSTOM}"
        )
    found: dict[str, Rubric] = {}
    for task, stem in names.known.items():
        try:
            found[task] = parse_rubric(stem, _read(paths[stem]), spec.score_max)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return found


def _check_pin(directory: Path, expected: str | None) -> list[str]:
    actual = rubrics_sha256(directory)
    if expected is None:
        return [
            f"vlm_reward_prompt_sha256: is missing; task rubrics are pinned: set it to {actual}, the digest "
            f"of {directory}, or use {CUSTOM}"
        ]
    if actual != expected.lower():
        return [
            f"vlm_reward_prompt_sha256: {directory} has digest {actual}, the config pins {expected}; use the "
            "pinned rubrics, or set the key to that digest (a new reward: use a new output_dir)"
        ]
    return []


def _read(path: Path) -> str:
    if path.stat().st_size > LARGEST:
        raise UserError(f"rubric {path.stem}: {path} is larger than {LARGEST // 1024} KiB; shorten it")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"rubric {path.stem}: {path} is not UTF-8 text; save it as such") from None


def _files(directory: Path) -> list[Path]:
    """Every file that is not hidden, nor in a hidden directory, by path."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )


def _distinct(found: Mapping[str, Rubric]) -> list[Rubric]:
    return list({rubric.name: rubric for rubric in found.values()}.values())


def _unknown_weights(spec: VlmRewardSpec, rubric: Rubric) -> list[str]:
    known = [SCORE, *rubric.criteria]
    return [
        f"reward_weights: {name} is no criterion of rubric {rubric.name}, which has {', '.join(known)}; "
        "weigh one of these"
        for name, _ in spec.weights
        if name not in known
    ]
