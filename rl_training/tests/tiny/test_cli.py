import argparse
from pathlib import Path

import pytest

from wan_trainer.cli import make_tiny
from wan_trainer.types import UserError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    make_tiny.configure(parser)
    return parser.parse_args(list(arguments))


def test_make_tiny_command_writes_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny"
    assert make_tiny.run(parse("--family", "t2v-1.3b", "--out", str(out), "--seed", "2"), []) == 0
    assert (out / "model_index.json").is_file()
    assert str(out) in capsys.readouterr().out


def test_make_tiny_command_rejects_unknown_arguments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sead"):
        make_tiny.run(parse("--family", "t2v-1.3b", "--out", str(tmp_path / "x")), ["--sead", "1"])
