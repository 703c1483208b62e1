"""The manifest of a checkpoint: which files it has, whether they are whole, which checkpoints are complete.

Torch-free, so that `wan-trainer verify` answers at once and preflight can ask.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from wan_trainer.digests import file_sha256
from wan_trainer.types import UserError

MANIFEST = "manifest.json"
NAME = re.compile(r"checkpoint-(\d+)")
# Hashing leaves the interpreter's lock, and storage answers several readers faster than one.
_READERS = 8
_REMEDY = "delete this checkpoint to resume from the one before"


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint as its manifest describes it; size in bytes."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says: the step and number of ranks it was written at, and files by POSIX path."""

    step: int
    world: int
    files: Mapping[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def hash_files(root: Path, paths: Iterable[Path]) -> dict[str, FileEntry]:
    """Size and sha256 of files below `root`, by their path relative to it."""
    found = sorted(paths)
    with ThreadPoolExecutor(_READERS) as pool:
        digests = list(pool.map(file_sha256, found))
    return {
        relative(root, path): FileEntry(path.stat().st_size, digest)
        for path, digest in zip(found, digests, strict=True)
    }


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises UserError when there is none that can be read."""
    try:
        value = json.loads((checkpoint / MANIFEST).read_bytes())
        files = {
            str(name): FileEntry(int(entry["size"]), str(entry["sha256"]))
            for name, entry in value["files"].items()
        }
        return Manifest(int(value["step"]), int(value["world"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{checkpoint}: {MANIFEST} is missing or unreadable ({type(error).__name__}): the checkpoint is "
            "incomplete; delete it to resume from the one before"
        ) from error


def verify_checkpoint(checkpoint: Path) -> Manifest:
    """Compare every file with the manifest, and return it.

    Raises UserError with one line per damaged, missing or foreign file.
    """
    manifest = read_manifest(checkpoint)
    problems: list[str] = []
    if checkpoint.resolve().name != f"checkpoint-{manifest.step}":
        problems.append(
            f"{checkpoint}: the manifest is of step {manifest.step}, the directory is not; restore its own "
            "manifest"
        )
    present = {relative(checkpoint, path) for path in checkpoint.rglob("*") if path.is_file()} - {MANIFEST}
    with ThreadPoolExecutor(_READERS) as pool:
        names = sorted(present | manifest.files.keys())
        found = pool.map(
            lambda name: _problem(checkpoint / name, name in present, manifest.files.get(name)), names
        )
        problems += [line for line in found if line is not None]
    if problems:
        raise UserError(*problems)
    return manifest


def _problem(path: Path, present: bool, entry: FileEntry | None) -> str | None:
    """What is wrong with one file."""
    if entry is None:
        return f"{path}: not in the manifest; {_REMEDY}"
    if not present:
        return f"{path}: missing; {_REMEDY}"
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{path}: {size} bytes, the manifest says {entry.size}; {_REMEDY}"
        if file_sha256(path) != entry.sha256:
            return f"{path}: its bytes differ from the manifest's sha256; {_REMEDY}"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror}); {_REMEDY}"
    return None


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, by step. Partial ones, which have no manifest, do not count."""
    return [path for path in named_checkpoints(output_dir) if (path / MANIFEST).is_file()]


def named_checkpoints(output_dir: Path) -> list[Path]:
    """Directories named like checkpoints, complete or not, by step."""
    found = [
        (int(match[1]), path)
        for path in output_dir.glob("checkpoint-*")
        if (match := NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None. Partial ones do not count."""
    found = checkpoints(output_dir)
    return found[-1] if found else None


def checkpoint_at(path: Path) -> Path:
    """The checkpoint a user means by its own path, or by its run's, whose newest complete one it then is.

    Raises UserError when there is none.
    """
    if path.name == "latest" and path.is_file():
        path = path.parent
    if not path.is_dir():
        raise UserError(f"{path} is no directory: name a checkpoint-<step> directory or an output_dir")
    if (path / MANIFEST).is_file() or NAME.fullmatch(path.resolve().name):
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise UserError(
            f"{path} holds no complete checkpoint: name a checkpoint-<step> directory or an output_dir"
        )
    return latest


def holds_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint, damaged perhaps, or the output_dir of a run that has some."""
    if not path.is_dir():
        return False
    return (
        (path / MANIFEST).is_file()
        or NAME.fullmatch(path.resolve().name) is not None
        or bool(named_checkpoints(path))
    )


def relative(root: Path, path: Path) -> str:
    """The POSIX path of a file below `root`."""
    return path.relative_to(root).as_posix()


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on disk when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
