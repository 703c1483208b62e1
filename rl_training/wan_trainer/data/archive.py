"""Reading one task archive without trusting it.

Nothing is ever extracted by a path that the archive names: a member either is one of the five known files of
a sample, and then its place on disk follows from the checked task name and sample id, or it is not written.
Members that could lead outside (absolute, with "..", links, devices) refuse the whole archive.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from wan_trainer.data.layout import MAY_BE_EMPTY, SAMPLE_FILES, is_safe_name
from wan_trainer.types import UserError


class Member(NamedTuple):
    """One file of a sample: its place in the sample, its size in bytes, and its content as a stream."""

    sample_id: str
    file: str
    size: int
    content: IO[bytes]


class ArchiveReader:
    """Walks the members of one archive once, in archive order.

    Wrap the walk in `one_line_errors`, since a damaged stream fails while a member's content is read. After
    the last member, `sha256` is the digest of the whole file and `unused` counts the plain files that
    belong to no known place (they are not written).
    """

    def __init__(self, path: Path, task: str, on_bytes: Callable[[int], None]) -> None:
        self.path = path
        self.task = task
        self.unused = 0
        self.sha256 = ""
        self._on_bytes = on_bytes

    def members(self) -> Iterator[Member]:
        """Every file of every sample. The content must be read before the next member is asked for.

        Raises UserError for an unsafe or empty member.
        """
        with self.path.open("rb") as file:
            raw = _MeteredReader(file, self._on_bytes)
            with gzip.GzipFile(fileobj=raw) as stream:
                # errorlevel and filters matter to extract() only, which is never called.
                with tarfile.open(fileobj=stream, mode="r|") as tar:
                    for info in tar:
                        place = self._place(info)
                        if place is None:
                            continue
                        content = tar.extractfile(info)
                        assert content is not None, info.name
                        yield Member(*place, info.size, content)
                # Read to the end, so that the checksum of the compressed stream is verified too.
                while stream.read(1 << 20):
                    pass
            self.sha256 = raw.digest()

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """A truncated or damaged archive raises UserError instead of what gzip and tarfile raise."""
        try:
            yield
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.path}: truncated or damaged archive ({reason}); download it again and rerun"
            ) from error

    def _place(self, info: tarfile.TarInfo) -> tuple[str, str] | None:
        """(sample id, file) of a member, None for a directory or an unknown file; UserError when unsafe."""
        parts = PurePosixPath(info.name).parts
        # PurePosixPath drops "." and doubled slashes, as the file system would.
        if not parts or parts[0] == "/" or ".." in parts or "\\" in info.name or "\0" in info.name:
            raise self._unsafe(info, "its path leads outside the archive")
        if info.isdir():
            return None
        if not info.isreg() or info.issparse():
            raise self._unsafe(info, "only plain files are accepted, no links, devices or sparse files")
        if parts[0] != self.task:
            raise self._unsafe(info, f"every member must lie below {self.task}/")
        file = "/".join(parts[3:])
        if file not in SAMPLE_FILES:
            self.unused += 1
            return None
        sample_id = parts[2]
        if not is_safe_name(sample_id):
            raise self._unsafe(info, "a sample id is letters, digits, '_', '-', '.' and '+'")
        if info.size == 0 and file not in MAY_BE_EMPTY:
            raise UserError(f"{self.path}: {info.name!r} is empty; download the archive again")
        return sample_id, file

    def _unsafe(self, info: tarfile.TarInfo, rule: str) -> UserError:
        return UserError(f"{self.path}: refused member {info.name!r}: {rule}; download the archive again")


class _MeteredReader(io.RawIOBase):
    """A file that reports how much was read from it and hashes what passes."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self._sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._sha256.update(data)
        self._on_bytes(len(data))
        return data

    def digest(self) -> str:
        """The sha256 of the file; what gzip left unread behind its last stream is read first."""
        while self.read(1 << 20):
            pass
        return self._sha256.hexdigest()
