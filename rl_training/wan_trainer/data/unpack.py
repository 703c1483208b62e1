"""From the public archives to the layout that training reads.

`raw/<task>/<sample id>/...`, `dataset.json`, `split_manifest_rl.json` and `materialization.json`. Two runs
over the same archives give the same bytes, and a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from wan_trainer.data.layout import (
    ARCHIVE_FOLDER,
    ARCHIVE_SUFFIX,
    DATASET_JSON,
    MATERIALIZATION,
    PUBLIC_REVISION,
    PUBLIC_SAMPLES,
    PUBLIC_TASKS,
    RAW_FOLDER,
    SOURCE_REPO,
    SPLIT_MANIFEST,
    TASK_SPLIT,
    is_safe_name,
)
from wan_trainer.data.materialize import ArchiveRecord, Job, materialize, write_json
from wan_trainer.media.atomic import replacing
from wan_trainer.types import UserError


class UnpackObserver(Protocol):
    """What a progress display is told. `advance` and `archive_done` are called from several threads."""

    def start(self, archives: int, total_bytes: int) -> None:
        """Unpacking begins; bytes are those of the compressed archives."""
        ...

    def advance(self, count: int) -> None:
        """`count` more compressed bytes were read, or need not be."""
        ...

    def archive_done(self, record: ArchiveRecord) -> None:
        """All samples of one archive are in place."""
        ...


@dataclass(frozen=True)
class UnpackSummary:
    """What is now in the output directory, and how many files this run wrote, found in place, or left out."""

    dataset_json: Path
    tasks: int
    samples: int
    written: int
    kept: int
    unused: int


class _Silent:
    def start(self, archives: int, total_bytes: int) -> None:
        pass

    def advance(self, count: int) -> None:
        pass

    def archive_done(self, record: ArchiveRecord) -> None:
        pass


def unpack(
    dataset_root: Path,
    output_dir: Path,
    *,
    source_revision: str = PUBLIC_REVISION,
    expected_tasks: int = PUBLIC_TASKS,
    expected_samples: int = PUBLIC_SAMPLES,
    workers: int = 8,
    verify_existing: bool = False,
    observer: UnpackObserver | None = None,
) -> UnpackSummary:
    """Materialise `<dataset_root>/VBVR-Pro-RL-Video/<task>.tar.gz` into `output_dir`.

    An archive that an earlier run finished is not read again, unless verify_existing asks to compare every
    byte. Raises UserError, listing every problem of every archive, when there are more or fewer archives or
    samples than expected, a sample is incomplete or there twice, a member is unsafe, an archive is damaged,
    or a compared file differs; the three JSON files are then not written.
    """
    if workers < 1:
        raise UserError(f"workers {workers}: at least 1 is needed")
    archives = _find_archives(dataset_root, expected_tasks)
    observer = observer or _Silent()
    job = Job(output_dir, verify_existing, observer.advance)
    job.raw.mkdir(parents=True, exist_ok=True)
    with _exclusive(job):
        _pin_revision(job, source_revision)
        observer.start(len(archives), sum(path.stat().st_size for path in archives.values()))
        records = _materialize_all(job, archives, workers, observer)
        samples = sum(len(record.sizes) for record in records)
        if samples != expected_samples:
            raise UserError(
                f"{dataset_root}: the {len(records)} archives hold {samples} samples, {expected_samples} are "
                f"expected; pass --expected-samples {samples} or complete the download"
            )
        _describe(output_dir, records, source_revision)
    return UnpackSummary(
        dataset_json=output_dir / DATASET_JSON,
        tasks=len(records),
        samples=samples,
        written=sum(record.written for record in records),
        kept=sum(record.kept for record in records),
        unused=sum(record.unused for record in records),
    )


def _find_archives(dataset_root: Path, expected_tasks: int) -> dict[str, Path]:
    """Task name -> archive, in task order."""
    folder = dataset_root / ARCHIVE_FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such directory; the dataset root is the one that holds {ARCHIVE_FOLDER}/"
        )
    archives = {path.name.removesuffix(ARCHIVE_SUFFIX): path for path in folder.glob(f"*{ARCHIVE_SUFFIX}")}
    unsafe = [
        f"{path}: {task!r} cannot name a task" for task, path in archives.items() if not is_safe_name(task)
    ]
    if unsafe:
        raise UserError(*(f"{line}; rename it to letters, digits, '_', '-' and '.'" for line in unsafe))
    if len(archives) != expected_tasks:
        raise UserError(
            f"{folder}: holds {len(archives)} task archives, {expected_tasks} are expected; "
            f"pass --expected-tasks {len(archives)} or complete the download"
        )
    return dict(sorted(archives.items()))


@contextmanager
def _exclusive(job: Job) -> Iterator[None]:
    """Hold the output directory for one unpack: two would overwrite each other's half-written files."""
    job.state.mkdir(exist_ok=True)
    with (job.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{job.output_dir}: another unpack is at work there; wait for it to end"
            ) from None
        shutil.rmtree(job.parts, ignore_errors=True)  # what a killed run left
        job.parts.mkdir()
        try:
            yield
        finally:
            shutil.rmtree(job.parts, ignore_errors=True)


def _pin_revision(job: Job, source_revision: str) -> None:
    """One output directory holds one revision: a mixture of two would look complete."""
    pin = job.state / "source_revision"
    if pin.exists() and (found := pin.read_text(encoding="utf-8")) != source_revision:
        raise UserError(
            f"{job.output_dir}: holds revision {found}, not {source_revision}; "
            "pass that --source-revision or another --output-dir"
        )
    with replacing(pin) as temporary:
        temporary.write_text(source_revision, encoding="utf-8")


def _materialize_all(
    job: Job, archives: Mapping[str, Path], workers: int, observer: UnpackObserver
) -> list[ArchiveRecord]:
    """The records in task order. Every archive is tried, so that one run names every problem."""

    def one(task: str, path: Path) -> ArchiveRecord:
        record = materialize(job, task, path)
        observer.archive_done(record)
        return record

    problems: list[str] = []
    records: list[ArchiveRecord] = []
    # Threads are enough: inflating, hashing and file access release the interpreter lock.
    with ThreadPoolExecutor(workers, thread_name_prefix="unpack") as pool:
        futures = [pool.submit(one, task, path) for task, path in archives.items()]
        try:
            for future in futures:
                try:
                    records.append(future.result())
                except UserError as error:
                    problems.extend(error.problems)
        finally:
            # On Ctrl-C the threads end at their next member instead of finishing gigabytes first.
            job.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    if problems:
        raise UserError(*problems)
    return records


def _describe(output_dir: Path, records: Sequence[ArchiveRecord], source_revision: str) -> None:
    """Write the three JSON files; paths are relative to dataset.json, so that the directory can move."""
    source = {record.task: f"{ARCHIVE_FOLDER}/{record.task}{ARCHIVE_SUFFIX}" for record in records}
    manifest = [
        {"task": record.task, "source": source[record.task], "split": TASK_SPLIT, "rl": list(record.sizes)}
        for record in records
    ]
    archives = [
        {
            "task": record.task,
            "archive": source[record.task],
            "size_bytes": record.size_bytes,
            "sha256": record.sha256,
            "samples": len(record.sizes),
            "unpacked_bytes": sum(sum(entry) for entry in record.sizes.values()),
        }
        for record in records
    ]
    materialization = {
        "source_repo": SOURCE_REPO,
        "source_revision": source_revision,
        "tasks": len(records),
        "samples": sum(len(record.sizes) for record in records),
        "archives": archives,
    }
    dataset = {
        "format": "vbvr_pro",
        "split_manifest": SPLIT_MANIFEST,
        "data_roots": [RAW_FOLDER],
        "split": "rl",
        "allowed_task_splits": [TASK_SPLIT],
        "check_files": "sample",
        # The reference recipes' video shape; a run's config overrides it.
        "num_frames": 81,
        "height": 512,
        "width": 512,
        "fps": 16,
    }
    write_json(output_dir / SPLIT_MANIFEST, manifest)
    write_json(output_dir / MATERIALIZATION, materialization)
    # Last: a directory that has a dataset.json is complete.
    write_json(output_dir / DATASET_JSON, [dataset])
