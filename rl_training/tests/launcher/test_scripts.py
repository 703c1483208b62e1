"""The bash scripts and their Python parts, without building anything."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPTS = REPOSITORY / "scripts"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / "lib" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheelhouse = load("wheelhouse")
summary = load("summary")


def make_wheel(folder: Path, name: str, version: str, content: str = "x") -> str:
    """A wheel file; its sha256."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{name}.py"), content)
    return wheelhouse.file_sha256(path)


def fill(folder: Path, wheels: Path, lock: Path, pip: str = "/bin/false") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / "lib" / "wheelhouse.py", "--wheelhouse", wheels, "--pip", pip, lock]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock of two wheels that are in wheelhouse/."""
    wheels = tmp_path / "wheelhouse"
    wheels.mkdir()
    first, second = make_wheel(wheels, "one_thing", "1.0"), make_wheel(wheels, "two", "2.1")
    path = tmp_path / "train.lock"
    path.write_text(
        f"# a comment\none-thing==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{first}\n"
        f"    # via two\ntwo==2.1 \\\n    --hash=sha256:{second}\n"
    )
    return path


def test_the_project_locks_are_read_whole():
    for name in ("train.lock", "tools.lock", "vllm.lock"):
        text = (REPOSITORY / "requirements" / name).read_text()
        assert "://" not in text and "--index-url" not in text, name
        pins = wheelhouse.read_lock(REPOSITORY / "requirements" / name)
        assert len(pins) == len(re.findall(r"^[^\s#].*==", text, re.MULTILINE))
        assert sum(len(digests) for digests, _ in pins.values()) == text.count("--hash=")


def test_a_full_wheelhouse_needs_no_network_and_is_stamped(tmp_path, lock):
    wheels = tmp_path / "wheelhouse"
    assert fill(tmp_path, wheels, lock).returncode == 0
    assert (wheels / ".complete").is_file()
    assert fill(tmp_path, wheels, lock).returncode == 0


def test_stale_and_damaged_wheels_go_and_missing_ones_are_named(tmp_path, lock):
    wheels = tmp_path / "wheelhouse"
    assert fill(tmp_path, wheels, lock).returncode == 0
    make_wheel(wheels, "old", "0.1")
    make_wheel(wheels, "two", "2.1", content="damaged")
    done = fill(tmp_path, wheels, lock)
    assert done.returncode == 1
    assert sorted(path.name for path in wheels.glob("*.whl")) == ["one_thing-1.0-py3-none-any.whl"]
    last = done.stderr.splitlines()[-1]
    assert "two==2.1" in last and "copy its wheelhouse/ directory here" in last
    assert not (wheels / ".complete").exists()


def test_only_what_is_missing_is_downloaded(tmp_path, lock):
    wheels = tmp_path / "wheelhouse"
    (wheels / "two-2.1-py3-none-any.whl").unlink()
    store = tmp_path / "store"
    store.mkdir()
    make_wheel(store, "two", "2.1")
    pip = tmp_path / "pip"
    pip.write_text(
        f'#!/bin/sh\necho "$@" >{tmp_path}/called\nfor last; do :; done\ncp {store}/*.whl "$last"\n'
        f'while [ "$1" != -r ]; do shift; done\ncp "$2" {tmp_path}/asked\n'
    )
    pip.chmod(0o755)
    assert fill(tmp_path, wheels, lock, str(pip)).returncode == 0
    asked = (tmp_path / "asked").read_text()
    assert "two==2.1" in asked and "one-thing" not in asked
    assert "--require-hashes" in (tmp_path / "called").read_text()


def test_the_summary_compares_the_fifths(tmp_path):
    values = [0.0, None, *[0.1 * step for step in range(1, 10)]]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"reward_mean": value}) + "\n" for value in values))
    assert summary.fifths(summary.rewards(path)) == pytest.approx((0.05, 0.85))
    (tmp_path / "latest").write_text("checkpoint-11\n")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "lib" / "summary.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "0.050 -> 0.850" in done.stdout and "checkpoint-11" in done.stdout


def test_a_run_without_metrics_is_said(tmp_path, capsys):
    assert summary.main(tmp_path) == 1
    assert "metrics.jsonl is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--algorithm=ppo"], "'ppo'; use grpo or refl"),
        (["--steps", "many"], "--steps"),
        (["--nproc=0"], "--nproc"),
        (["--steps"], "needs a value"),
    ],
)
def test_quickstart_refuses_bad_input_in_one_line(arguments, named):
    done = subprocess.run(
        [SCRIPTS / "quickstart", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and named in done.stderr


@pytest.mark.parametrize("script", ["setup", "quickstart", "test"])
def test_scripts_are_executable_and_parse(script):
    path = SCRIPTS / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], timeout=60, check=True)


def test_fish_files_parse():
    files = sorted(SCRIPTS.rglob("*.fish"))
    assert len(files) >= 2
    subprocess.run(["fish", "-n", *files], timeout=60, check=True)
