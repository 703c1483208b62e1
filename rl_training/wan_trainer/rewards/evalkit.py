"""The external evaluator's checkout: its digest, its shape, and the names of its tasks.

The checkout is the user's, never part of this package. A run pins it by the digest of the files that can
change a score, so that a reward cannot drift unnoticed between nodes or between runs.
"""

from __future__ import annotations

import difflib
import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from wan_trainer.digests import files_sha256
from wan_trainer.rewards.messages import one_line
from wan_trainer.rewards.process import ScorerFailure, ScorerProcess, ScorerSettings
from wan_trainer.types import UserError

ENTRY = "run_evaluation.py"
OTHER_ENTRY = "run_evaluation_video.py"
PACKAGE = "vbvr_bench"
DESCRIBE_TIMEOUT_S = 180.0

OCR_MODELS = ("craft_mlt_25k.pth", "english_g2.pth")
"""What EasyOCR needs to find and read English text without a network."""


@dataclass(frozen=True)
class TaskNames:
    """How a dataset's task names map to the evaluator's.

    known: dataset name -> evaluator name. unknown: dataset name -> the nearest evaluator name, or None.
    """

    known: dict[str, str]
    unknown: dict[str, str | None]


def source_sha256(directory: Path) -> str:
    """The digest that pins an evaluator checkout, 64 hexadecimal characters.

    sha256 over run_evaluation.py, the sorted vbvr_bench/**/*.py, the sorted files of annotations/**, and
    requirements.txt if present, in this order; for each the 4-byte big-endian length of its POSIX path
    relative to `directory`, that path, the 8-byte big-endian length of its content, and the content. The
    lengths keep two different trees from giving one byte stream. Sorting is by path components, as
    `pathlib` compares. Raises UserError when `directory` is no evaluator checkout.
    """
    _check_layout(directory)
    return files_sha256((path.relative_to(directory).as_posix(), path) for path in _source_files(directory))


def check_checkout(directory: Path, expected_sha256: str) -> None:
    """Raise UserError unless `directory` is an evaluator checkout with the pinned digest."""
    actual = source_sha256(directory)
    if actual != expected_sha256.lower():
        raise UserError(
            f"vbvr_reward_evalkit_source_sha256: {directory} has digest {actual}, the config pins "
            f"{expected_sha256}; use the pinned checkout, or, if this one is meant, set the key to what "
            f"`wan-trainer evalkit-digest {directory}` prints (a new reward: use a new output_dir)"
        )


def match_tasks(tasks: Iterable[str], evaluator_tasks: Collection[str]) -> TaskNames:
    """Map dataset task names to the evaluator's: the same name, or the only one that differs in spelling.

    Spelling is case, "-" for "_" or space, and the suffixes "_data-generator" and "_task", which some
    releases of the evaluator or the data leave out. A shared number ("O-34") is not enough: releases have
    renumbered tasks.
    """
    exact = frozenset(evaluator_tasks)
    spellings: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(exact):
        spellings[_spelling(name)].append(name)
    known: dict[str, str] = {}
    unknown: dict[str, str | None] = {}
    for task in sorted(set(tasks)):
        candidates = [task] if task in exact else spellings.get(_spelling(task), [])
        if len(candidates) == 1:
            known[task] = candidates[0]
            continue
        nearest = difflib.get_close_matches(_spelling(task), spellings, n=1)
        unknown[task] = spellings[nearest[0]][0] if nearest else None
    return TaskNames(known, unknown)


def supported_tasks(
    directory: Path,
    tasks: Iterable[str],
    *,
    easyocr_module_path: Path | None = None,
    timeout_s: float = DESCRIBE_TIMEOUT_S,
) -> TaskNames:
    """Which of `tasks` the checkout can score, asked of the evaluator itself in a process of its own.

    The evaluator is foreign code with heavy imports; the trainer never imports it. Raises UserError when it
    does not import within timeout_s.
    """
    _check_layout(directory)
    with tempfile.TemporaryDirectory(prefix="wan-trainer-describe-") as work_dir:
        settings = evaluator_settings(directory, Path(work_dir), 1, easyocr_module_path)
        try:
            scorer = ScorerProcess(settings, "describe", threading.Event())
            try:
                names = scorer.greet(timeout_s)
            except BaseException:
                scorer.kill()
                raise
            scorer.stop()
        except ScorerFailure as failure:
            raise unusable(directory, failure) from failure
    return match_tasks(tasks, names)


def evaluator_settings(
    directory: Path,
    work_dir: Path,
    threads: int,
    easyocr_module_path: Path | None,
    *,
    fast_decode: bool = False,
) -> ScorerSettings:
    """Scorer processes for the evaluator in `directory`."""
    ocr = {} if easyocr_module_path is None else {"EASYOCR_MODULE_PATH": str(easyocr_module_path)}
    words = ("fast-decode",) if fast_decode else ()
    return ScorerSettings(directory, work_dir, threads, arguments=words, environment=ocr)


def missing_ocr_models(module_path: Path) -> str | None:
    """What is missing of EasyOCR's models below `module_path`, one line with the remedy; None: nothing."""
    folder = module_path / "model"
    files = [folder / name for name in OCR_MODELS]
    missing = [path.name for path in files if not (path.is_file() and path.stat().st_size)]
    if not missing:
        return None
    return (
        f"vbvr_reward_easyocr_module_path: {folder} has no {' and no '.join(missing)}; put the files there, "
        "or set null when no task reads text"
    )


def unusable(directory: Path, failure: ScorerFailure) -> UserError:
    """The user's error for an evaluator that cannot be started."""
    return UserError(
        f"vbvr_reward_evalkit_dir: {directory}: {failure}; "
        "install what the evaluator needs into this environment"
    )


def unsupported_message(unknown: dict[str, str | None], evaluator_tasks: int | None = None) -> str:
    """One line that names the tasks without an evaluator, the nearest names, and the remedies."""
    named = [f"{task} (nearest: {near})" if near else task for task, near in unknown.items()]
    shown = ", ".join(named[:8]) + (f", and {len(named) - 8} more" if len(named) > 8 else "")
    among = "" if evaluator_tasks is None else f" among its {evaluator_tasks} tasks"
    return one_line(
        f"the evaluator has no scorer{among} for {len(unknown)} of the dataset's tasks: {shown}; "
        "remove the tasks from the dataset, use an evaluator that knows them, or set "
        "vbvr_reward_unsupported_score",
        limit=2000,
    )


def _check_layout(directory: Path) -> None:
    if not directory.is_dir():
        raise UserError(
            f"vbvr_reward_evalkit_dir: {directory} is no directory; point it at a checkout of the evaluator"
        )
    missing = [
        name
        for name, present in (
            (ENTRY, (directory / ENTRY).is_file()),
            (f"{PACKAGE}/", (directory / PACKAGE).is_dir()),
        )
        if not present
    ]
    if missing:
        other = directory / OTHER_ENTRY
        note = f" ({OTHER_ENTRY} belongs to another evaluator)" if other.is_file() else ""
        raise UserError(
            f"vbvr_reward_evalkit_dir: {directory} has no {' and no '.join(missing)}{note}; "
            f"point it at the directory of the evaluator's checkout that holds {ENTRY} and {PACKAGE}/"
        )


def _source_files(directory: Path) -> list[Path]:
    files = [directory / ENTRY, *sorted((directory / PACKAGE).rglob("*.py"))]
    files += sorted((directory / "annotations").rglob("*"))
    files.append(directory / "requirements.txt")
    return [path for path in files if path.is_file()]


def _spelling(task: str) -> str:
    plain = re.sub(r"[-\s]+", "_", task.strip().lower())
    return plain.removesuffix("_data_generator").removesuffix("_task")
