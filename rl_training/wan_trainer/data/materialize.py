"""One archive onto disk: files whole or absent, finished archives recorded, old files not trusted.

The state folder holds nothing that training reads: a record per finished archive, which spares reading it
again, and the half-written files of this run.
"""

from __future__ import annotations

import filecmp
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from wan_trainer.data.archive import ArchiveReader, Member
from wan_trainer.data.layout import RAW_FOLDER, SAMPLE_FILES
from wan_trainer.media.atomic import replacing
from wan_trainer.types import UserError

STATE_FOLDER = ".unpack"
NAMES_SHOWN = 5
COPY_BYTES = 1 << 20


class Stopped(Exception):
    """The run was interrupted; nobody reads this archive's result any more."""


@dataclass(frozen=True)
class ArchiveRecord:
    """One finished archive. sizes: sample id -> size in bytes of each of SAMPLE_FILES, in that order.

    written, kept and unused count the files of this run and go into no output file.
    """

    task: str
    size_bytes: int
    mtime_ns: int
    sha256: str
    sizes: Mapping[str, tuple[int, ...]]
    written: int = 0
    kept: int = 0
    unused: int = 0


@dataclass(frozen=True)
class Job:
    """What all archives of a run share. `advance` is told how many compressed bytes were dealt with."""

    output_dir: Path
    verify_existing: bool
    advance: Callable[[int], None]
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def raw(self) -> Path:
        """Where samples go: raw/<task>/<sample id>/."""
        return self.output_dir / RAW_FOLDER

    @property
    def state(self) -> Path:
        """Records, lock and half-written files."""
        return self.output_dir / STATE_FOLDER

    @property
    def parts(self) -> Path:
        """Half-written files, on the same file system as `raw`, so that a rename moves them."""
        return self.state / "parts"


def materialize(job: Job, task: str, path: Path) -> ArchiveRecord:
    """Put every sample of one archive in place.

    Raises UserError naming each unsafe, duplicate, incomplete or (with verify_existing) changed file.
    """
    try:
        record = None if job.verify_existing else _finished(job, task, path)
        if record is None:
            record = _stream(job, task, path)
            _save_record(job, record)
    except OSError as error:
        place, reason = error.filename or path, error.strerror or error
        raise UserError(f"{place}: {reason}; mend it and run again, finished files are kept") from error
    return record


def write_json(path: Path, value: object) -> None:
    """Write one JSON document atomically; the same value gives the same bytes."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _stream(job: Job, task: str, path: Path) -> ArchiveRecord:
    stat = path.stat()
    sizes: dict[str, dict[str, int]] = {}
    problems: list[str] = []
    written = kept = 0
    reader = ArchiveReader(path, task, job.advance)
    with reader.one_line_errors():
        for member in reader.members():
            if job.stop.is_set():
                raise Stopped
            sample, file = member.sample_id, member.file
            files = sizes.setdefault(sample, {})
            if file in files:
                raise UserError(
                    f"{path}: sample {sample} is there twice ({file}); download the archive again"
                )
            files[file] = member.size
            target = job.raw / task / sample / file
            if not (job.verify_existing and target.exists()):
                fresh = _place(job, target, member)
            else:
                fresh = False
                if not _same_bytes(target, member):
                    problems.append(f"{target}: differs from {path}; delete it and run again")
            written, kept = written + fresh, kept + (not fresh)
    problems.extend(_incomplete(path, sizes))
    if problems:
        raise UserError(*problems)
    by_sample = {sample: tuple(sizes[sample][file] for file in SAMPLE_FILES) for sample in sorted(sizes)}
    return ArchiveRecord(
        task, stat.st_size, stat.st_mtime_ns, reader.sha256, by_sample, written, kept, reader.unused
    )


def _incomplete(path: Path, sizes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """One line for each of the first samples that lack files, and one with their number."""
    lacking = {
        sample: [file for file in SAMPLE_FILES if file not in files]
        for sample, files in sizes.items()
        if len(files) < len(SAMPLE_FILES)
    }
    lines = [
        f"{path}: sample {sample} is incomplete, it lacks {', '.join(lacking[sample])}; download it again"
        for sample in sorted(lacking)[:NAMES_SHOWN]
    ]
    if len(lacking) > NAMES_SHOWN:
        lines.append(f"{path}: {len(lacking)} samples are incomplete in all; download the archive again")
    return lines


def _place(job: Job, target: Path, member: Member) -> bool:
    """Write a member beside the tree and rename it into place; False when the same bytes were there already.

    A truncated stream raises while it is read, before the rename, and so leaves no file. A file that an
    earlier run left with other bytes (archives made anew) is replaced.
    """
    part = job.parts / str(threading.get_ident())
    with part.open("wb") as file:
        for block in _blocks(member.content):
            file.write(block)
        count = file.tell()
    assert count == member.size, (member.sample_id, member.file, count, member.size)
    if target.exists() and filecmp.cmp(part, target, shallow=False):
        return False
    try:
        part.replace(target)
    except FileNotFoundError:  # the sample's first file
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
    return True


def _same_bytes(target: Path, member: Member) -> bool:
    with target.open("rb") as file:
        return all(file.read(len(block)) == block for block in _blocks(member.content)) and not file.read(1)


def _blocks(stream: IO[bytes]) -> Iterator[bytes]:
    while block := stream.read(COPY_BYTES):
        yield block


def _record_path(job: Job, task: str) -> Path:
    return job.state / f"{task}.json"


def _save_record(job: Job, record: ArchiveRecord) -> None:
    values = {
        "size_bytes": record.size_bytes,
        "mtime_ns": record.mtime_ns,
        "sha256": record.sha256,
        "sizes": record.sizes,
    }
    write_json(_record_path(job, record.task), values)


def _finished(job: Job, task: str, path: Path) -> ArchiveRecord | None:
    """The record of an earlier run, if the archive is unchanged and every file still has its size."""
    stat = path.stat()
    try:
        values = json.loads(_record_path(job, task).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # a power cut may leave an empty record
        return None
    if (values["size_bytes"], values["mtime_ns"]) != (stat.st_size, stat.st_mtime_ns):
        return None
    sizes = {sample: tuple(entry) for sample, entry in values["sizes"].items()}
    for sample, entry in sizes.items():
        for file, size in zip(SAMPLE_FILES, entry, strict=True):
            target = job.raw / task / sample / file
            if not target.exists() or target.stat().st_size != size:
                return None
    job.advance(stat.st_size)
    kept = len(sizes) * len(SAMPLE_FILES)
    return ArchiveRecord(task, stat.st_size, stat.st_mtime_ns, values["sha256"], sizes, kept=kept)
