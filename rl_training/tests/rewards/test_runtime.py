"""The libraries that evaluators score with."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest

from wan_trainer.cli import scorer_runtime as command
from wan_trainer.cli.main import main
from wan_trainer.rewards import runtime as runtime_module
from wan_trainer.rewards.runtime import scorer_runtime

PROGRAM = """
from wan_trainer.rewards.runtime import scorer_runtime
print(scorer_runtime(import_all=False).fingerprint)
"""


def test_the_fingerprint_is_the_same_in_another_process_and_follows_versions() -> None:
    here = scorer_runtime(import_all=False)
    assert here.problems == []
    there = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert there.stdout.strip() == here.fingerprint == scorer_runtime(import_all=False).fingerprint
    other = replace(here.packages[0], installed="1.26.4")
    changed = replace(here, packages=(other, *here.packages[1:]))
    assert changed.fingerprint != here.fingerprint
    (line,) = changed.deviations
    assert line == f"numpy is 1.26.4, the lock has {other.locked}"


def test_opencv_5_is_recognised_by_what_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cv2.HoughLinesP
    monkeypatch.setattr(cv2, "HoughLinesP", lambda *words, **named: np.asarray(real(*words, **named))[:, 0])
    (line,) = scorer_runtime(import_all=False).problems
    assert "(N, 4)" in line and "below 5" in line


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quick = scorer_runtime(import_all=False)
    monkeypatch.setattr(command, "scorer_runtime", lambda: quick)
    assert main(["scorer-runtime", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fingerprint"] == quick.fingerprint and facts["lines_layout"] == "(N, 1, 4)"
    assert {package["name"] for package in facts["packages"]} == set(runtime_module.PACKAGES)
    monkeypatch.setitem(runtime_module.PACKAGES, "no-such-distribution", "no_such_module")
    monkeypatch.setattr(command, "scorer_runtime", lambda: scorer_runtime(import_all=False))
    assert main(["scorer-runtime"]) == 1
    assert "no-such-distribution is not installed" in capsys.readouterr().out
