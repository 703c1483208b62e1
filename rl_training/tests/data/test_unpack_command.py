"""`wan-trainer unpack` as a user types it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from rl_training.tests.data.archives import tree
from wan_trainer.cli import unpack as command
from wan_trainer.data.layout import PUBLIC_REVISION


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    args, rest = parser.parse_known_args(arguments)
    return command.run(args, rest)


def test_it_unpacks_and_says_what_is_there(
    dataset_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dataset-root", str(dataset_root), "--output-dir", str(tmp_path / "out")]
    arguments += ["--expected-tasks=2", "--expected-samples", "6", "--workers", "1"]
    assert run(*arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert "2 tasks, 6 samples: 30 files written, 0 already there" in said
    assert f"dataset: {tmp_path / 'out' / 'dataset.json'}" in said
    assert any(line.startswith("2/2 ") and "3 samples, 15 files written" in line for line in said)
    assert run(*arguments, "--verify-existing") == 0
    assert "2 tasks, 6 samples: 0 files written, 30 already there" in capsys.readouterr().out
    assert len(tree(tmp_path / "out" / "raw")) == 30


def test_the_defaults_are_the_public_data_set() -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    args = parser.parse_args(["--dataset-root", "a", "--output-dir", "b"])
    assert (args.source_revision, args.expected_tasks, args.expected_samples) == (PUBLIC_REVISION, 50, 50_000)
    assert args.workers >= 1 and args.verify_existing is False


def test_a_terminal_sees_a_bar_that_fills(
    dataset_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Console", lambda: Console(force_terminal=True, width=100))
    run(
        *("--dataset-root", str(dataset_root), "--output-dir", str(tmp_path / "out")),
        *("--expected-tasks", "2", "--expected-samples", "6"),
    )
    said = capsys.readouterr().out
    assert "2/2 archives" in said and "\x1b[" in said
