"""`wan-trainer verify`: every kind of damage is one line, and torch is never imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wan_trainer.cli.main import main
from wan_trainer.recording.manifest import (
    checkpoint_at,
    hash_files,
    latest_checkpoint,
    read_manifest,
    verify_checkpoint,
)
from wan_trainer.types import UserError


def write_checkpoint(run: Path, step: int) -> Path:
    """A checkpoint of three small files, as a run leaves it."""
    checkpoint = run / f"checkpoint-{step}"
    (checkpoint / "state").mkdir(parents=True)
    for rank in range(2):
        (checkpoint / "state" / f"__{rank}_0.distcp").write_bytes(bytes(range(step, step + 100)))
    (checkpoint / "train_state.json").write_text("{}")
    files = hash_files(checkpoint, [path for path in checkpoint.rglob("*") if path.is_file()])
    entries = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()}
    manifest = {"format": 1, "step": step, "world": 2, "files": entries}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The newest of two whole checkpoints of one run."""
    write_checkpoint(tmp_path, 2)
    return write_checkpoint(tmp_path, 10)


def flip(checkpoint: Path) -> None:
    shard = checkpoint / "state" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[50] ^= 1
    shard.write_bytes(bytes(content))


def truncate(checkpoint: Path) -> None:
    (checkpoint / "state" / "__0_0.distcp").write_bytes(b"short")


def lose(checkpoint: Path) -> None:
    (checkpoint / "state" / "__0_0.distcp").unlink()


def add(checkpoint: Path) -> None:
    (checkpoint / "state" / "__2_0.distcp").write_bytes(b"of an older save")


def lose_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def tear_manifest(checkpoint: Path) -> None:
    content = (checkpoint / "manifest.json").read_bytes()
    (checkpoint / "manifest.json").write_bytes(content[:-20])


def empty_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"step": 10, "world": 2, "files": {"a": 3}}')


def other_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(
        (checkpoint.parent / "checkpoint-2/manifest.json").read_bytes()
    )


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        (flip, ["__1_0.distcp: its bytes differ from the manifest's sha256"]),
        (truncate, ["__0_0.distcp: 5 bytes, the manifest says 100"]),
        (lose, ["__0_0.distcp: missing"]),
        (add, ["__2_0.distcp: not in the manifest"]),
        (lose_manifest, ["manifest.json is missing or unreadable (FileNotFoundError)"]),
        (tear_manifest, ["manifest.json is missing or unreadable (JSONDecodeError)"]),
        (empty_manifest, ["manifest.json is missing or unreadable (TypeError)"]),
        (other_manifest, ["the manifest is of step 2", "__0_0.distcp: its bytes", "__1_0.distcp: its bytes"]),
    ],
)
def test_damage_is_a_line_each_and_status_2(
    checkpoint: Path, damage: Callable[[Path], None], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    assert "whole (3 files, 202 bytes, step 10)" in capsys.readouterr().out
    damage(checkpoint)
    assert main(["verify", str(checkpoint)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    problems = found.err.splitlines()
    assert len(problems) == len(lines)
    assert all(line in problem for line, problem in zip(lines, problems, strict=True)), problems
    # Of a run, every checkpoint is looked at, the whole ones named too.
    assert main(["verify", str(checkpoint.parent)]) == 2
    found = capsys.readouterr()
    assert "checkpoint-2: whole" in found.out and found.err.splitlines() == problems


def test_a_checkpoint_is_found_by_its_run(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("checkpoint-10\n")
    (tmp_path / ".partial-checkpoint-12").mkdir()
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-12b").mkdir()
    assert latest_checkpoint(tmp_path) == checkpoint
    assert checkpoint_at(tmp_path) == checkpoint_at(tmp_path / "latest") == checkpoint
    assert checkpoint_at(checkpoint) == checkpoint
    assert checkpoint_at(tmp_path / "checkpoint-11").name == "checkpoint-11", "named, so it is judged"
    with pytest.raises(UserError, match=r"checkpoint-11: manifest\.json is missing"):
        read_manifest(tmp_path / "checkpoint-11")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        checkpoint_at(tmp_path / "checkpoint-12b")
    assert verify_checkpoint(checkpoint).world == 2


def test_commands_that_look_at_files_start_without_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from wan_trainer.cli.main import main; status = main(sys.argv[1:]);"
        "import wan_trainer.cli.export, wan_trainer.cli.record_diff;"
        "print(status, 'torch' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(checkpoint)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False False"
