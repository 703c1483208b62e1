"""One run per output directory."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from wan_trainer.types import UserError


class RunLock:
    """A lock on `<output_dir>/.lock`; the kernel drops it when its owner dies, so it is never stale.

    Raises UserError when another run holds it or the directory cannot be written.
    """

    def __init__(self, output_dir: Path) -> None:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            self._file = (output_dir / ".lock").open("a+")
        except OSError as error:
            raise UserError(
                f"output_dir {output_dir} cannot be written ({error.strerror}): choose another output_dir"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(
                f"output_dir {output_dir} is in use by {owner}: wait for that run, stop it, or choose "
                "another output_dir"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let the next run start."""
        self._file.close()
