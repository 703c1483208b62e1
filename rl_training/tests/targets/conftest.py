"""A module of the user's, importable for one test."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """module(source): write it where Python finds it; its name, another one each time."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(source: str) -> str:
        name = f"users_module_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)
