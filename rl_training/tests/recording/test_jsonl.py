import json
import math
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from wan_trainer.recording.jsonl import JsonlFile, RowReader, as_json, encode, write_atomic


@dataclass(frozen=True)
class Point:
    x: float
    name: Path


def strict(text: bytes) -> object:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_values_are_strict_json_with_all_digits() -> None:
    value = {
        "nan": math.nan,
        "inf": -math.inf,
        "tenth": 0.1 + 0.2,
        "small": 1.2345678901234567e-300,
        "single": np.float32(0.1),
        "count": np.int64(7),
        "points": (Point(1.5, Path("/a/b")),),
        "names": {"b", "a"},
        3: True,
    }
    back = strict(encode(value))
    assert back == {
        "nan": None,
        "inf": None,
        "tenth": 0.1 + 0.2,
        "small": 1.2345678901234567e-300,
        "single": float(np.float32(0.1)),
        "count": 7,
        "points": [{"x": 1.5, "name": "/a/b"}],
        "names": ["a", "b"],
        "3": True,
    }


def test_any_text_survives() -> None:
    text = '\u732b \U0001f600 \n \u2028 \x00 \udc80 \\ "'
    line = encode({"prompt": text})
    assert b"\n" not in line
    assert strict(line) == {"prompt": text}


def test_a_value_without_json_form_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="object"):
        as_json(object())


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", []),
        (b'{"a": 1}\n{"a": 2', [1]),
        (b'{"a": 1}\n{"a": 2}', [1, 2]),
        (b'{"a', []),
        (b'{"a": 1}\n' + b"\0" * 9000, [1]),
        (b'{"a": 1}\n{"b": "' + b"x" * 20_000, [1]),
    ],
)
def test_opening_mends_a_torn_last_line(tmp_path: Path, content: bytes, kept: list[int]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    file = JsonlFile(path)
    file.append({"a": 99})
    file.close()
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [*kept, 99]


def test_reading_counts_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\nnot json\n[1]\n\n{"a": 2}\n{"a": 3')
    reader = RowReader(path)
    assert [row["a"] for row in reader] == [1, 2]
    assert reader.damaged == 3
    assert list(RowReader(tmp_path / "absent")) == []


def test_reading_the_tail_starts_at_a_whole_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"a": {number}}}\n' for number in range(10)))
    reader = RowReader(path, tail_bytes=25)
    assert [row["a"] for row in reader] == [8, 9]
    assert reader.damaged == 0
    assert len(list(RowReader(path, tail_bytes=1000))) == 10


def test_a_row_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from wan_trainer.recording.jsonl import JsonlFile\n"
        "file = JsonlFile(Path(sys.argv[1]))\nfor a in range(50): file.append({'a': a})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["a"] for row in RowReader(path)] == list(range(50))


def test_keeping_rows_is_atomic_and_appending_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = JsonlFile(path)
    for number in range(6):
        file.append({"a": number})
    with path.open("ab") as raw:
        raw.write(b"damaged\n")
    file.keep(lambda row: row["a"] != 2)
    file.append({"a": 6})
    file.close()
    file.close()
    assert path.read_text() == "".join(f'{{"a": {number}}}\n' for number in (0, 1, 3, 4, 5, 6))
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_filter_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = JsonlFile(path)
    file.append({"a": 1})
    with pytest.raises(KeyError):
        file.keep(lambda row: bool(row["missing"]))
    file.append({"a": 2})
    file.close()
    assert [row["a"] for row in RowReader(path)] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_write_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
