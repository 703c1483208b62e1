"""The supervisor as a process: exit status from run.json, signals to the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from wan_trainer.preflight.supervise import children, recorded_status, supervise, translate

# A stand-in for torchrun: starts two "ranks" that write a file on SIGTERM, waits for both, and answers 1 if
# any of them failed, as torchrun does. It notes a signal that reaches itself.
TORCHRUN = """
import pathlib, signal, subprocess, sys
folder = pathlib.Path(sys.argv[1])
def note(number, frame):
    (folder / "torchrun_signalled").touch()
    for rank in ranks:
        rank.kill()
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)
command = [sys.executable, "-SE", str(folder / "rank.py"), str(folder)]
ranks = [subprocess.Popen([*command, str(i)], start_new_session=True) for i in range(2)]
sys.exit(int(any(rank.wait() for rank in ranks)))
"""
RANK = """
import json, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), sys.argv[2]
def stop(number, frame):
    (folder / f"saved_{rank}").write_text(str(number))
    if rank == "0":
        (folder / "run.json").write_text(json.dumps({"starts": [{"exit_status": 75}]}))
    if not (folder / "stubborn").exists():
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
(folder / f"ready_{rank}").touch()
for _ in range(600):
    time.sleep(0.05)
"""


def start(folder: Path, command: list[str]) -> subprocess.Popen[str]:
    module = [sys.executable, "-m", "wan_trainer.preflight.supervise", "--output-dir", str(folder), "--"]
    return subprocess.Popen([*module, *command], stderr=subprocess.PIPE, text=True)


def start_ranks(folder: Path) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK)
    (folder / "torchrun.py").write_text(TORCHRUN)
    supervisor = start(folder, [sys.executable, "-SE", str(folder / "torchrun.py"), str(folder)])
    wait_for(folder / "ready_0", folder / "ready_1")
    return supervisor


def wait_for(*paths: Path, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"none of {paths} in time"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_ends_in_75(tmp_path, number):
    supervisor = start_ranks(tmp_path)
    supervisor.send_signal(number)
    _, stderr = supervisor.communicate(timeout=20)
    assert supervisor.returncode == 75
    assert [(tmp_path / f"saved_{rank}").read_text() for rank in (0, 1)] == [str(number.value)] * 2
    # torchrun itself must not hear of it: it would kill the ranks while they save.
    assert not (tmp_path / "torchrun_signalled").exists()
    assert "the ranks stop at the next safe point" in stderr


def test_a_second_signal_ends_ranks_that_do_not_stop(tmp_path):
    (tmp_path / "stubborn").touch()
    supervisor = start_ranks(tmp_path)
    supervisor.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "saved_0", tmp_path / "saved_1")
    time.sleep(1.2)  # sooner it would be the same request arriving twice
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=20)
    assert (tmp_path / "torchrun_signalled").exists()


def test_a_supervisor_that_is_killed_takes_torchrun_with_it(tmp_path):
    supervisor = start_ranks(tmp_path)
    (torchrun,) = children(supervisor.pid)
    ranks = children(torchrun)
    try:
        supervisor.kill()
        supervisor.wait(timeout=20)
        deadline = time.monotonic() + 10
        while runs(torchrun):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        supervisor.communicate(timeout=20)


def runs(pid: int) -> bool:
    """False too for what has ended and nobody waits for."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def test_the_first_failure_is_the_last_line_and_an_old_one_is_not(tmp_path):
    failure = tmp_path / "first_failure.txt"
    write = f"open({str(failure)!r}, 'w').write('ValueError: why (rank 3, phase replay, step 7)\\n')"
    _, stderr = start(tmp_path, child(f"{write}; raise SystemExit(1)")).communicate(timeout=20)
    assert stderr == "launcher: the first failure: ValueError: why (rank 3, phase replay, step 7)\n"
    _, stderr = start(tmp_path, child("raise SystemExit(1)")).communicate(timeout=20)
    assert stderr == ""


def test_a_request_that_arrives_several_times_at_once_is_one_request(tmp_path):
    """`timeout` signals its child and then the whole group; handlers interrupt each other."""
    supervisor = start_ranks(tmp_path)
    for number in [signal.SIGTERM, signal.SIGINT, signal.SIGTERM] * 5:
        supervisor.send_signal(number)
    _, stderr = supervisor.communicate(timeout=20)
    assert supervisor.returncode == 75
    assert "Traceback" not in stderr
    assert not (tmp_path / "torchrun_signalled").exists()


def test_a_signal_before_there_are_ranks_ends_torchrun(tmp_path):
    started = tmp_path / "started"
    supervisor = start(tmp_path, child(f"import time; open({str(started)!r}, 'w'); time.sleep(20)"))
    wait_for(started)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=10)
    assert supervisor.returncode == 1


def child(body: str) -> list[str]:
    # Without the site's packages, which it does not need.
    return [sys.executable, "-SEc", textwrap.dedent(body)]


@pytest.fixture
def handlers() -> Iterator[None]:
    """A supervisor in this process leaves its signal handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("status", "record", "expected"),
    [
        (0, {"starts": [{"exit_status": 0}]}, 0),
        (1, {"starts": [{"exit_status": 2}]}, 2),
        (1, {"starts": [{"exit_status": 75}]}, 75),
        (1, {"starts": [{"exit_status": 1}]}, 1),
        (1, {"starts": [{"exit_status": 0}]}, 1),
        (1, {"starts": [{"exit_status": None}]}, 1),
        (1, {"exit_status": 75, "starts": [{"exit_status": 75}, {"exit_status": None}]}, 1),
        (1, None, 1),
        (7, None, 1),
        (2, None, 2),
        (75, None, 75),
        (75, {"starts": [{"exit_status": 1}]}, 75),
    ],
)
def test_the_record_explains_torchruns_status(tmp_path, handlers, status, record, expected):
    write = (
        "" if record is None else f"open({str(tmp_path / 'run.json')!r}, 'w').write({json.dumps(record)!r});"
    )
    assert supervise(child(f"{write} raise SystemExit({status})"), tmp_path) == expected


def test_an_untouched_record_says_nothing(tmp_path, handlers):
    (tmp_path / "run.json").write_text('{"starts": [{"exit_status": 75}]}')
    assert supervise(child("raise SystemExit(1)"), tmp_path) == 1


def test_arguments_arrive_unchanged(tmp_path):
    odd = ["", "two words", "--output-dir", "--", "it's"]
    body = f"import json, sys; open({str(tmp_path / 'argv')!r}, 'w').write(json.dumps(sys.argv[1:]))"
    supervisor = start(tmp_path, [*child(body), *odd])
    supervisor.communicate(timeout=20)
    assert json.loads((tmp_path / "argv").read_text()) == odd


def test_a_damaged_record_is_no_record(tmp_path):
    (tmp_path / "run.json").write_text("{")
    assert recorded_status(tmp_path) is None
    (tmp_path / "run.json").write_text("[75]")
    assert recorded_status(tmp_path) is None
    assert translate(-9, None) == 1


def test_children_are_the_direct_ones():
    process = subprocess.Popen(["sleep", "20"])
    try:
        assert process.pid in children(os.getpid())
        assert children(process.pid) == []
    finally:
        process.kill()
        process.wait()
