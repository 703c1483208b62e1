"""The pool's own promises: scorers die with their parent, restarts, closing, bounded resources."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wan_trainer.rewards.messages import ScoreJob, Verdict, one_line
from wan_trainer.rewards.pool import ScorerPool, ScorerTimeouts
from wan_trainer.rewards.process import ScorerFailure, ScorerSettings
from wan_trainer.rewards.scratch import Scratch
from wan_trainer.types import RewardRequest

# The rule reward's own tests measure what is covered of a scorer.
pytestmark = pytest.mark.usefixtures("unmeasured")

PARENT = """
import sys, time
from pathlib import Path
import numpy as np
from wan_trainer.rewards.messages import ScoreJob
from wan_trainer.rewards.pool import ScorerPool, ScorerTimeouts
from wan_trainer.rewards.process import ScorerSettings
from wan_trainer.rewards.scratch import Scratch

evalkit, place = Path(sys.argv[1]), Path(sys.argv[2])
scratch = Scratch(place, keep=False)
pool = ScorerPool(ScorerSettings(evalkit, scratch.path, 1), ScorerTimeouts(300.0), workers=2)
pool.names()
video = str(scratch.path / "a.mp4")
job = ScoreJob(video, (3, 32, 32, 3), "hang", {"gt_path": str(place)}, "cpu", 8, 32, 32, 12, 5.0, 1)
pool.submit(job, np.zeros((3, 32, 32, 3), np.uint8))  # one scorer is busy for ever, the other idle
while not (scratch.path / "a.mp4").exists():
    time.sleep(0.05)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def pool(evalkit: Path, tmp_path: Path) -> Iterator[ScorerPool]:
    """One scorer."""
    made = ScorerPool(ScorerSettings(evalkit, tmp_path, 1), ScorerTimeouts(20.0), workers=1)
    yield made
    made.close()


def _job(tmp_path: Path, task: str, shape: tuple[int, int, int, int] = (3, 32, 32, 3)) -> ScoreJob:
    return ScoreJob(
        video_path=str(tmp_path / "candidate.mp4"),
        shape=shape,
        task=task,
        gt_info={"gt_path": str(tmp_path), "prompt": "p"},
        device="cpu",
        fps=8,
        prepared_width=32,
        prepared_height=32,
        prepare_crf=12,
        max_duration_s=5.0,
        threads=1,
    )


def _frames() -> np.ndarray:
    return np.full((3, 32, 32, 3), 128, np.uint8)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_scorers_die_with_their_parent(
    tmp_path: Path,
    evalkit: Path,
    scorers: Callable[[], list[int]],
    wait_until: Callable[..., bool],
    number: int,
) -> None:
    place = tmp_path / "scratch"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(evalkit), str(place)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        assert len(scorers()) == 2
        parent.send_signal(number)
        parent.wait(10)
        assert wait_until(lambda: scorers() == [], 3.0)
    finally:
        parent.kill()
        parent.wait(10)
    assert len(list(place.iterdir())) == 1  # the dead owner could not clean up; the next owner does
    Scratch(place, keep=False).close()
    assert list(place.iterdir()) == []


def test_a_scorer_ignores_the_signals_of_its_group(
    pool: ScorerPool, tmp_path: Path, scorers: Callable[[], list[int]]
) -> None:
    """Ctrl-C and the cluster's SIGTERM reach every process; the rewards in flight are still wanted."""
    pool.names()
    (pid,) = scorers()
    assert os.getpgid(pid) == pid != os.getpgid(0)
    future = pool.submit(_job(tmp_path, "slow"), _frames())
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert future.result(20).error is None
    assert scorers() == [pid]


def test_an_idle_scorer_that_was_killed_is_replaced(
    pool: ScorerPool, tmp_path: Path, scorers: Callable[[], list[int]], wait_until: Callable[..., bool]
) -> None:
    pool.names()
    (pid,) = scorers()
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: scorers() == [])
    assert pool.submit(_job(tmp_path, "brightness"), _frames()).result(20).error is None
    assert scorers() != [pid]


def test_a_warm_scorer_is_used_again(
    pool: ScorerPool, tmp_path: Path, scorers: Callable[[], list[int]]
) -> None:
    pool.names()
    before = scorers()
    for task in ("brightness", "nan", "raise", "brightness"):
        pool.submit(_job(tmp_path, task), _frames()).result(20)
    assert scorers() == before


def test_no_file_descriptor_is_left_open(pool: ScorerPool, tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    pool.submit(_job(tmp_path, "brightness"), _frames()).result(20)
    before = count()
    for task in ("brightness", "exit", "raise", "brightness"):
        pool.submit(_job(tmp_path, task), _frames()).result(20)
    assert count() == before


def test_frames_reach_the_evaluator_unchanged_in_shape_and_value(pool: ScorerPool, tmp_path: Path) -> None:
    big = np.zeros((9, 32, 32, 3), np.uint8)
    big[:] = np.arange(9, dtype=np.uint8)[:, None, None, None] * 25
    strided = np.asfortranarray(big)  # not contiguous: rows of a tensor seldom are
    verdict = pool.submit(_job(tmp_path, "brightness", (9, 32, 32, 3)), strided).result(20)
    assert verdict.components["score"] == pytest.approx(100 / 255, abs=0.01)


def test_a_scorer_that_cannot_start_costs_samples_and_says_why(tmp_path: Path, evalkit: Path) -> None:
    """The evaluator breaks after the run began, say its disk went away: missing samples, no hang."""
    copy = tmp_path / "copy"
    shutil.copytree(evalkit, copy)
    pool = ScorerPool(ScorerSettings(copy, tmp_path, 1), ScorerTimeouts(20.0, 20.0), workers=1)
    try:
        assert "brightness" in pool.names()
        shutil.rmtree(copy)
        verdict = pool.submit(_job(tmp_path, "exit"), _frames()).result(20)
        assert verdict.error is not None and "cannot start" in verdict.error
    finally:
        pool.close()


def test_a_pool_whose_evaluator_never_imports_answers(tmp_path: Path) -> None:
    (tmp_path / "run_evaluation.py").write_text("raise ImportError('no cv2')")
    pool = ScorerPool(ScorerSettings(tmp_path, tmp_path, 1), ScorerTimeouts(20.0, 20.0), workers=2)
    try:
        with pytest.raises(ScorerFailure, match="ImportError: no cv2"):
            pool.names()
        verdict = pool.submit(_job(tmp_path, "brightness"), _frames()).result(20)
        assert verdict.error is not None and "no cv2" in verdict.error
    finally:
        pool.close()


def test_what_cannot_be_queued_or_sent_is_a_verdict(pool: ScorerPool, tmp_path: Path) -> None:
    """Neither a full descriptor table nor a defect on our side may raise, or leave a sample open."""
    pool.names()
    wrong: Any = {"gt_path": {"a", "set"}}
    unsendable = dataclasses.replace(_job(tmp_path, "brightness"), gt_info=wrong)
    assert "TypeError" in str(pool.submit(unsendable, _frames()).result(20).error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        verdict = pool.submit(_job(tmp_path, "brightness"), _frames()).result(20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert "cannot be queued" in str(verdict.error)
    assert pool.submit(_job(tmp_path, "brightness"), _frames()).result(20).error is None


def test_closing_during_the_start_does_not_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "run_evaluation.py").write_text("import time; time.sleep(600)")
    pool = ScorerPool(ScorerSettings(tmp_path, tmp_path, 1), ScorerTimeouts(20.0), workers=1)
    before = time.monotonic()
    pool.close()
    assert time.monotonic() - before < 4.0


def test_a_scorer_that_breaks_the_protocol_is_replaced(tmp_path: Path, evalkit: Path) -> None:
    """An evaluator can write to any descriptor it finds, the pipe's included."""
    copy = tmp_path / "copy"
    shutil.copytree(evalkit, copy)
    source = (copy / "run_evaluation.py").read_text()
    (copy / "run_evaluation.py").write_text(source + MEDDLER)
    pool = ScorerPool(ScorerSettings(copy, tmp_path, 1), ScorerTimeouts(20.0), workers=1)
    try:
        for task in ("wrong_json", "huge"):
            verdict = pool.submit(_job(tmp_path, task), _frames()).result(20)
            assert verdict.error is not None and verdict.components == {}, task
            expected = "no verdict" if task == "wrong_json" else "broke its pipe"
            assert expected in verdict.error, verdict.error
        assert pool.submit(_job(tmp_path, "brightness"), _frames()).result(20).error is None
    finally:
        pool.close()


MEDDLER = """
import stat, struct, sys
_plain = evaluate_single_video

def evaluate_single_video(video_path, task_name, gt_info, device):
    messages = {"wrong_json": b"[1, 2]", "huge": b"x" * (3 << 20)}
    pipe = int(sys.argv[1])
    if task_name in messages:
        data = struct.pack("!i", len(messages[task_name])) + messages[task_name]
        while data:
            data = data[os.write(pipe, data):]
    return _plain(video_path, task_name, gt_info, device)
"""


def test_scratch_directories_of_living_owners_and_kept_ones_stay(tmp_path: Path) -> None:
    alive, kept = Scratch(tmp_path, keep=False), Scratch(tmp_path, keep=True)
    (kept.path / "video.mp4").touch()
    kept.close()
    other = Scratch(tmp_path, keep=False)
    assert alive.path.is_dir() and (kept.path / "video.mp4").exists()
    other.close()
    alive.close()
    alive.close()
    assert list(tmp_path.iterdir()) == [kept.path]


def test_messages_survive_the_pipe(make_request: Callable[..., RewardRequest]) -> None:
    job = _job(Path("/tmp"), "größe \udce4 →")
    assert ScoreJob.decode(job.encode()) == job
    verdict = Verdict({"score": 0.1}, None, True, 1.5, 2.5)
    assert Verdict.decode(verdict.encode()) == verdict
    assert one_line("a\n b" * 500).endswith("...") and len(one_line("a\n b" * 500)) == 300
