"""sha256 of files, by which runs, nodes, checkpoints and caches tell whether they hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_CHUNK = 1 << 20


def file_sha256(path: Path) -> str:
    """sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """sha256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def files_sha256(files: Iterable[tuple[str, Path]]) -> str:
    """One sha256 over named files in the order given, in hexadecimal.

    For each: the 4-byte big-endian length of its name, the name, the 8-byte big-endian length of its content,
    the content. The lengths keep two different trees from giving one byte stream.
    """
    digest = hashlib.sha256()
    for name, path in files:
        text = name.encode()
        digest.update(len(text).to_bytes(4, "big") + text + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
