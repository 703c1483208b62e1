"""torchrun with real ranks: the launcher's status is how they ended; no traceback hides what they said."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wan_trainer.preflight.agent import status_of
from wan_trainer.preflight.network import free_port

RANK = """
import os, signal, sys, time
how = sys.argv[1 + int(os.environ["RANK"])]
assert sys.argv[3:] == ["two words", "", "--config"], sys.argv
if how == "sleep":
    time.sleep(30)
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""


def torchrun(folder: Path, first: str, second: str) -> subprocess.CompletedProcess[str]:
    (folder / "rank.py").write_text(RANK)
    options = ["--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2", "--max-restarts", "0"]
    options += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--rdzv-conf", "timeout=20"]
    command = [sys.executable, "-m", "wan_trainer.preflight.agent", *options, str(folder / "rank.py")]
    return subprocess.run(
        [*command, first, second, "two words", "", "--config"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_ranks_that_are_done_end_in_0(tmp_path):
    done = torchrun(tmp_path, "0", "0")
    assert done.returncode == 0, done.stderr


def test_ranks_that_end_alike_give_their_status_and_nothing_else(tmp_path):
    done = torchrun(tmp_path, "75", "75")
    assert done.returncode == 75
    assert "Traceback" not in done.stderr and "launcher:" not in done.stderr


def test_a_rank_that_is_killed_is_named_in_one_line(tmp_path):
    done = torchrun(tmp_path, "sleep", "kill")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("launcher:")]
    assert "rank 1" in line and "SIGKILL" in line


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75, 75], 75),
        ([75, -signal.SIGTERM], 75),
        ([2, 2], 2),
        ([75, 1], 1),
        ([2, 75], 1),
        ([1], 1),
        ([0], 1),
        ([-signal.SIGKILL], 1),
        ([-signal.SIGTERM], 1),
    ],
)
def test_one_rank_that_failed_is_a_failure(codes, expected):
    assert status_of(codes) == expected
