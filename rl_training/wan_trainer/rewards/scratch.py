"""A directory of our own in the user's: removed at the end, or by the next run after a kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

OWNED_PREFIX = "scorer-"
KEPT_PREFIX = "kept-"
LOCK_NAME = ".owner"


class Scratch:
    """A directory `path` that only this object uses.

    Several ranks, of several nodes where the parent is on a shared disk, work in one parent directory. A
    file lock tells a living owner from a dead one on every node, which a process id would not. Kept
    directories are the user's: they are never removed.
    """

    def __init__(self, parent: Path, *, keep: bool) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        # The interpreter's exit removes it too, should nobody call `close`.
        self._directory = tempfile.TemporaryDirectory(
            prefix=KEPT_PREFIX if keep else OWNED_PREFIX,
            dir=parent,
            ignore_cleanup_errors=True,
            delete=not keep,
        )
        self.path = Path(self._directory.name)
        self._lock = os.open(self.path / f"{LOCK_NAME}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Named only once it is locked: a sweeping neighbour never finds a fresh directory without its lock.
        (self.path / f"{LOCK_NAME}.new").rename(self.path / LOCK_NAME)
        self._keep = keep

    def close(self) -> None:
        """Remove the directory, unless it is kept. May be called twice."""
        if self._lock < 0:
            return
        os.close(self._lock)
        self._lock = -1
        if not self._keep:
            self._directory.cleanup()


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of owners that died without cleaning up."""
    for lock_path in parent.glob(f"{OWNED_PREFIX}*/{LOCK_NAME}"):
        with suppress(OSError):  # a neighbour may be removing it at this moment
            descriptor = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
