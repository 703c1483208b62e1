"""torchrun with real ranks: the launcher's status is how they ended; no traceback hides what they said."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rl_training.tests.ranks import run_ranks
from wan_trainer.preflight.agent import launch, status_of
from wan_trainer.preflight.network import free_port

RANK = """
import os, signal, sys, time
how = sys.argv[1 + int(os.environ["RANK"])]
assert sys.argv[3:] == ["two words", "", "--config"], sys.argv
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2", os.environ
if how == "sleep":
    time.sleep(30)
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""


def launches(folder: str, *ends: tuple[str, str]) -> list[tuple[int, str]]:
    """torchrun in this process, once for each pair of ends of its ranks: status and standard error."""
    script = Path(folder) / "rank.py"
    script.write_text(RANK)
    options = ["--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2", "--max-restarts", "0"]
    options += ["--master-addr", "127.0.0.1", "--rdzv-conf", "timeout=20"]
    seen: list[tuple[int, str]] = []
    for first, second in ends:
        words = ["--master-port", str(free_port()), str(script), first, second, "two words", "", "--config"]
        errors = Path(folder) / f"{first}-{second}"
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 2)
        seen.append((launch([*options, *words]), errors.read_text()))
    return seen


def test_the_status_is_how_the_ranks_ended_and_says_no_more_than_that(tmp_path):
    ((done, alike, killed),) = run_ranks(
        1, launches, str(tmp_path), ("0", "0"), ("75", "75"), ("sleep", "kill")
    )
    assert done[0] == 0, done[1]
    assert alike[0] == 75
    assert "Traceback" not in alike[1] and "launcher:" not in alike[1]
    assert killed[0] == 1
    assert "Traceback" not in killed[1]
    (line,) = [line for line in killed[1].splitlines() if line.startswith("launcher:")]
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
