"""Strict JSON values and append-only files of one JSON object a line.

A line is one write, so a killed process tears at most the last line; opening a file for appending mends it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from numbers import Integral, Real
from pathlib import Path

type Json = bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None
type JsonObject = dict[str, Json]


def as_json(value: object) -> Json:
    """`value` as strict JSON: dataclasses become objects, paths strings, nan and infinity null.

    Raises TypeError for anything without an obvious JSON form, which is a mistake of the caller.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: as_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Set):
        return [as_json(item) for item in sorted(value, key=str)]
    if isinstance(value, Sequence):
        return [as_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def encode(value: object, indent: int | None = None) -> bytes:
    """`value` as UTF-8 JSON. Floats keep all their digits; a lone surrogate becomes its JSON escape."""
    text = json.dumps(as_json(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", errors="backslashreplace")


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: readers see the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def parse_line(line: bytes) -> JsonObject | None:
    """The object on one line, or None when the line is torn or is not an object."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class RowReader:
    """Iterates over the rows of a file that may be absent, empty, torn, or still being written.

    Damaged lines are left out and counted in `damaged`. With `tail_bytes`, only rows that begin
    within that many bytes of the end are read.
    """

    def __init__(self, path: Path, tail_bytes: int | None = None) -> None:
        self.path = path
        self.tail_bytes = tail_bytes
        self.damaged = 0

    def __iter__(self) -> Iterator[JsonObject]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            if self.tail_bytes is not None and self.path.stat().st_size > self.tail_bytes:
                file.seek(-self.tail_bytes, os.SEEK_END)
                file.readline()
            for line in file:
                row = parse_line(line)
                if row is not None:
                    yield row
                elif line.strip():
                    self.damaged += 1


class JsonlFile:
    """A file opened for appending. One writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, row: object) -> None:
        """Write one row and its newline in one go. Raises OSError when the disk is full."""
        line = memoryview(encode(row) + b"\n")
        # A regular file takes a line whole, unless the disk is full: then the next write raises.
        while line:
            line = line[os.write(self._fd, line) :]

    def keep(self, wanted: Callable[[JsonObject], bool]) -> None:
        """Drop every row that is not wanted, and every damaged line, atomically."""
        os.close(self._fd)
        self._fd = -1
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            with self.path.open("rb") as source, partial.open("wb") as target:
                for line in source:
                    row = parse_line(line)
                    if row is not None and wanted(row):
                        target.write(line)
                target.flush()
                os.fsync(target.fileno())
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _mend_last_line(path: Path) -> None:
    """Make the file end in a newline: complete a whole last row that lacks it, cut a torn one off."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        tail = b""
        start = end
        while start > 0 and b"\n" not in tail:
            size = min(4096, start)
            start -= size
            file.seek(start)
            tail = file.read(size) + tail
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if parse_line(last) is None:
            file.truncate(end - len(last))
        else:
            file.seek(end)
            file.write(b"\n")
