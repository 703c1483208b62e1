"""What can be told of a network file without loading it, and without torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ONNX = ".onnx"
SAFETENSORS = ".safetensors"
_SUFFIXES = (ONNX, SAFETENSORS, ".pt", ".pth")
_CONVERTER = ("onnx", "onnx2torch")


def file_problem(file: Path) -> str | None:
    """What keeps a network file from being loaded, as its name, its first bytes and the environment tell."""
    if file.suffix not in _SUFFIXES:
        return f"{file}, a network is one of {', '.join(_SUFFIXES)}; name such a file"
    if not file.is_file():
        return f"{file} is missing; put the file there, or name the directory and the files that you have"
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}; let this user read it"
    if not start or start.startswith(b"version https://git-lfs"):
        what = "a Git LFS pointer" if start else "empty"
        return f"{file} is {what}, not a network; download the file itself"
    missing = [name for name in _CONVERTER if not _installed(name)] if file.suffix == ONNX else []
    if missing:
        lacking = " and ".join(missing)
        return f"{file} needs {lacking}, not installed; pip install -r requirements/reward-face.txt"
    return None


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # its name is blocked in sys.modules
        return False
