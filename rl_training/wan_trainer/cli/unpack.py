# ruff: noqa: T201
"""`wan-trainer unpack`: the public task archives become a dataset directory."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from wan_trainer.data.layout import PUBLIC_REVISION, PUBLIC_SAMPLES, PUBLIC_TASKS
from wan_trainer.data.materialize import ArchiveRecord
from wan_trainer.data.unpack import unpack


class _Display:
    """A progress bar on a terminal, one line per finished archive in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._done = self._archives = 0
        self.progress = Progress(
            TextColumn("unpack {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self.progress.add_task("", total=None)

    def start(self, archives: int, total_bytes: int) -> None:
        self._archives = archives
        self.progress.update(self._bar, total=total_bytes, description=f"0/{archives} archives")

    def advance(self, count: int) -> None:
        self.progress.advance(self._bar, count)

    def archive_done(self, record: ArchiveRecord) -> None:
        with self._lock:
            self._done += 1
            text = f"{self._done}/{self._archives}"
            self.progress.update(self._bar, description=f"{text} archives")
            if not self._console.is_terminal:
                print(f"{text} {record.task}: {len(record.sizes)} samples, {record.written} files written")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of contracts in docs/data.md."""
    parser.add_argument(
        "--dataset-root",
        type=Path,
        required=True,
        help="directory that holds VBVR-Pro-RL-Video/<task>.tar.gz",
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="where raw/ and dataset.json go")
    parser.add_argument(
        "--source-revision",
        default=PUBLIC_REVISION,
        help="revision of the archives, for the record (default: %(default)s)",
    )
    parser.add_argument(
        "--expected-tasks", type=int, default=PUBLIC_TASKS, help="number of archives (default: %(default)s)"
    )
    parser.add_argument(
        "--expected-samples",
        type=int,
        default=PUBLIC_SAMPLES,
        help="number of samples (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="archives read at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--verify-existing",
        action="store_true",
        help="read every archive again and compare every file that is already there, byte by byte",
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Unpack, and say what is there now."""
    display = _Display(Console())
    with display.progress:
        summary = unpack(
            args.dataset_root.resolve(),
            args.output_dir.resolve(),
            source_revision=args.source_revision,
            expected_tasks=args.expected_tasks,
            expected_samples=args.expected_samples,
            workers=args.workers,
            verify_existing=args.verify_existing,
            observer=display,
        )
    unused = f", {summary.unused} members of no sample left out" if summary.unused else ""
    print(
        f"{summary.tasks} tasks, {summary.samples} samples: {summary.written} files written, "
        f"{summary.kept} already there{unused}"
    )
    print(f"dataset: {summary.dataset_json}")
    return 0
