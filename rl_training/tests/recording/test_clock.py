import json
import os
import subprocess
import sys
import threading
import time

import pytest

from wan_trainer.recording.clock import Clock


def test_spans_nest_and_drain_once() -> None:
    clock = Clock(rank=3)
    before = time.time()
    with clock.span("prepare", 7):
        time.sleep(0.01)
        with clock.span("rollout", 7):
            time.sleep(0.02)
    inner, outer = clock.drain()
    assert [(span.rank, span.phase, span.step) for span in (inner, outer)] == [
        (3, "rollout", 7),
        (3, "prepare", 7),
    ]
    assert outer.start <= inner.start <= inner.end <= outer.end
    assert inner.end - inner.start >= 0.02
    assert before - 0.01 <= outer.start <= time.time()
    assert clock.drain() == []


def test_wall_clock_set_back_moves_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(rank=0)
    with clock.span("first", 0):
        pass
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with clock.span("second", 0):
        pass
    first, second = clock.drain()
    assert second.start >= first.end


def test_failure_is_timed_and_named_once_by_the_innermost_span() -> None:
    clock = Clock(rank=2)
    with pytest.raises(ValueError, match="bad") as caught, clock.span("update", 9), clock.span("replay", 9):
        raise ValueError("bad")
    assert caught.value.__notes__ == ["wan_trainer: rank 2, phase replay, step 9"]
    assert [span.phase for span in clock.drain()] == ["replay", "update"]


def test_spans_of_two_processes_line_up() -> None:
    code = (
        "import time, json\nfrom wan_trainer.recording.clock import Clock\nclock = Clock(1)\n"
        "with clock.span('work', 0): time.sleep(0.05)\nprint(json.dumps(clock.drain()))"
    )
    clock = Clock(0)
    with clock.span("around", 0):
        output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=os.environ)
    (around,) = clock.drain()
    ((_, _, _, start, end),) = json.loads(output.stdout)
    assert around.start < start < end < around.end


def test_no_span_is_lost_between_threads() -> None:
    clock = Clock(0)
    drained = []

    def work() -> None:
        for step in range(500):
            with clock.span("w", step):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += clock.drain()
    drained += clock.drain()
    assert len(drained) == 2000


def test_recording_starts_without_torch() -> None:
    code = (
        "import sys\nimport wan_trainer.recording.opening, wan_trainer.recording.run_record\n"
        "assert not {'torch', 'wandb'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
