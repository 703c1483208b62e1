"""The evaluator checkout: digest, layout, task names."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wan_trainer.cli import evalkit_digest
from wan_trainer.rewards.evalkit import (
    check_checkout,
    match_tasks,
    source_sha256,
    supported_tasks,
    unsupported_message,
)
from wan_trainer.types import UserError


def _checkout(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_digest_equals_an_independent_computation(tmp_path: Path) -> None:
    names = {
        "run_evaluation.py": b"entry",
        "vbvr_bench/__init__.py": b"",
        "vbvr_bench/a/z.py": b"deep",
        "vbvr_bench/b.py": b"bb",
        "annotations/task/1.json": b'{"k": 1}',
        "annotations/é.json": b"{}",
        "requirements.txt": b"numpy\n",
    }
    _checkout(tmp_path, names)
    _checkout(
        tmp_path, {"README.md": b"not part", "vbvr_bench/data.json": b"not part", "easyocr_models/m": b"x"}
    )
    stream = b""
    for name, content in names.items():  # written in the order of the contract
        raw = name.encode()
        stream += struct.pack(">I", len(raw)) + raw + struct.pack(">Q", len(content)) + content
    assert source_sha256(tmp_path) == hashlib.sha256(stream).hexdigest()


def test_golden_digest(tmp_path: Path) -> None:
    """A published digest stays valid: this value was computed with coreutils (printf and sha256sum)."""
    _checkout(tmp_path, {"run_evaluation.py": b"x = 1\n", "vbvr_bench/__init__.py": b""})
    assert source_sha256(tmp_path) == "581032c465bfa5e71bc62aa8d08bc4456a52ce9e0b8e91e66a3366d337c588da"


def test_the_command_names_its_argument_not_a_key(tmp_path: Path) -> None:
    for directory in (tmp_path / "nope", tmp_path):
        with pytest.raises(UserError) as caught:
            evalkit_digest.run(argparse.Namespace(directory=directory), [])
        assert caught.value.problems[0].startswith(str(directory))


@pytest.mark.parametrize(
    "name", ["run_evaluation.py", "vbvr_bench/b.py", "annotations/a.txt", "requirements.txt"]
)
def test_digest_sees_every_pinned_file(tmp_path: Path, name: str) -> None:
    _checkout(tmp_path, {"run_evaluation.py": b"entry", "vbvr_bench/b.py": b"bb"})
    before = source_sha256(tmp_path)
    _checkout(tmp_path, {name: b"changed"})
    assert source_sha256(tmp_path) != before


def test_moving_bytes_between_name_and_content_changes_the_digest(tmp_path: Path) -> None:
    one = _checkout(
        tmp_path / "1", {"run_evaluation.py": b"e", "vbvr_bench/a.py": b"", "annotations/ab": b"c"}
    )
    two = _checkout(
        tmp_path / "2", {"run_evaluation.py": b"e", "vbvr_bench/a.py": b"", "annotations/a": b"bc"}
    )
    assert source_sha256(one) != source_sha256(two)


def test_mismatch_names_both_digests_and_the_command(evalkit: Path) -> None:
    actual, pinned = source_sha256(evalkit), "ab" * 32
    with pytest.raises(UserError) as caught:
        check_checkout(evalkit, pinned)
    (line,) = caught.value.problems
    assert (
        actual in line
        and pinned in line
        and f"wan-trainer evalkit-digest {evalkit}" in line
        and "\n" not in line
    )
    check_checkout(evalkit, actual.upper())


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"run_evaluation.py": b""}, "no vbvr_bench/"),
        ({"vbvr_bench/__init__.py": b""}, "no run_evaluation.py"),
        ({"readme": b""}, "no run_evaluation.py and no vbvr_bench/"),
        ({"run_evaluation_video.py": b"", "vbvr_bench/__init__.py": b""}, "belongs to another evaluator"),
    ],
)
def test_incomplete_checkout_is_refused(tmp_path: Path, files: dict[str, bytes], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        source_sha256(_checkout(tmp_path, files))


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no directory"):
        check_checkout(tmp_path / "absent", "0" * 64)


def test_command_prints_the_digest_alone(evalkit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    evalkit_digest.configure(parser)
    assert evalkit_digest.run(parser.parse_args([str(evalkit)]), []) == 0
    assert capsys.readouterr().out == source_sha256(evalkit) + "\n"


def test_task_names_match_by_spelling_only() -> None:
    evaluator = ["O-34_dot_to_dot_task_data-generator", "G-29_chart_extreme", "O-1_a", "o-1_A", "O-24_domino"]
    tasks = [
        "O-34_dot_to_dot_task_data-generator",  # the same
        "O-34_dot_to_dot",  # suffixes left out
        "g_29_Chart extreme_data-generator",  # case, dashes, spaces
        "O-1_a",  # exact wins over its ambiguous spelling
        "O_1_A",  # ambiguous
        "O-24_dominoes",  # another name, although the number is the same
        "Z-1_unheard_of",
    ]
    names = match_tasks(tasks, evaluator)
    assert names.known == {
        tasks[0]: evaluator[0],
        tasks[1]: evaluator[0],
        tasks[2]: evaluator[1],
        tasks[3]: "O-1_a",
    }
    assert set(names.unknown) == {"O_1_A", "O-24_dominoes", "Z-1_unheard_of"}
    assert names.unknown["O-24_dominoes"] == "O-24_domino" and names.unknown["Z-1_unheard_of"] is None
    line = unsupported_message(names.unknown, 5)
    assert "O-24_dominoes (nearest: O-24_domino)" in line and "vbvr_reward_unsupported_score" in line


def test_long_lists_of_unknown_tasks_stay_one_line() -> None:
    line = unsupported_message({f"T-{index}": None for index in range(300)})
    assert "300 of the dataset's tasks" in line and "and 292 more" in line and "\n" not in line


def test_supported_tasks_asks_the_evaluator_in_another_process(
    evalkit: Path, scorers: Callable[[], list[int]]
) -> None:
    names = supported_tasks(evalkit, ["brightness", "O-1_dots", "missing"])
    assert names.known == {"brightness": "brightness", "O-1_dots": "O-1_dots_data-generator"}
    assert list(names.unknown) == ["missing"]
    assert "run_evaluation" not in sys.modules and "vbvr_bench" not in sys.modules
    assert scorers() == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a_package_nobody_has", "ModuleNotFoundError: No module named 'a_package_nobody_has'"),
        ("import sys; sys.exit('licence missing')", "SystemExit: licence missing"),
        ("print('gone'); import os; os._exit(7)", "exited with status 7.*it last printed: gone"),
        ("TASK_EVALUATOR_MAP = {}", "evaluate_single_video"),
        ("import time; time.sleep(1000)", "no answer within 2 s while importing"),
    ],
)
def test_an_evaluator_that_does_not_import_is_one_line(
    tmp_path: Path, evalkit: Path, source: str, expected: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(evalkit, broken)
    (broken / "run_evaluation.py").write_text(source)
    with pytest.raises(UserError, match=expected) as caught:
        supported_tasks(broken, ["brightness"], timeout_s=2.0 if "sleep" in source else 30.0)
    assert len(caught.value.problems) == 1 and "\n" not in caught.value.problems[0]


def test_the_module_is_light() -> None:
    """Preflight and the command line import it, and a scorer starts with the worker module: no torch."""
    modules = "wan_trainer.rewards.evalkit, wan_trainer.rewards.evaluator_worker"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
