"""Step times against an event-by-event simulation, and the times that a run left behind."""

import itertools
import json

import pytest

from wan_trainer.cli.main import main
from wan_trainer.planning.timing import (
    PhaseTimes,
    estimate_steps,
    measured_phase_times,
    parse_phase_times,
)
from wan_trainer.types import UserError

CPS = "configs/train_rl_5b_cps.yaml"


def simulate(phases: PhaseTimes, waves: int, depth: int, steps: int = 40) -> float:
    """Seconds a step of the scheduler's loop: one trainer and one scorer, each doing one thing at a time."""
    now = scorer = 0.0
    pending: list[list[float]] = []
    ends = [0.0]
    for _ in range(steps):
        ready = []
        for _ in range(waves):
            now += phases.rollout / waves
            scorer = max(scorer, now) + phases.reward / waves
            ready.append(scorer)
        pending.append(ready)
        if len(pending) > depth:
            for scored in pending.pop(0):
                now = max(now, scored) + phases.replay / waves
            ends.append(now)
    half = len(ends) // 2
    return (ends[-1] - ends[half]) / (len(ends) - 1 - half)


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize(
    "phases", [PhaseTimes(40, 35, 60), PhaseTimes(10, 80, 20), PhaseTimes(30, 1, 5), PhaseTimes(5, 12, 40)]
)
def test_step_times_are_those_of_the_loop(phases, waves):
    times = estimate_steps(phases, waves)
    assert times.synchronous == pytest.approx(simulate(phases, waves, 0))
    assert times.delayed == pytest.approx(simulate(phases, waves, 1), rel=0.01)
    assert times.speedup == times.synchronous / times.delayed


def test_one_wave_adds_up_and_delay_takes_the_slower_side():
    times = estimate_steps(PhaseTimes(40, 50, 60), 1)
    assert (times.synchronous, times.delayed, times.speedup) == (150, 100, 1.5)
    assert estimate_steps(PhaseTimes(4, 50, 6), 1).delayed == 50


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("rollout=1,reward=2", "replay is missing"),
        ("rollout=1,reward=x,replay=2", "'reward=x' is not a number"),
        ("rollout=1,reward=-1,replay=2", "'reward=-1' is not a number"),
        ("rollout=1,rollout=1,reward=2,replay=2", "each once"),
        ("sampling=3", "'sampling=3' is not one of"),
        ("rollout=0,reward=0,replay=0", "0 s"),
    ],
)
def test_bad_times_are_one_line(text, fragment):
    with pytest.raises(UserError, match=fragment) as caught:
        parse_phase_times(text)
    assert len(caught.value.problems) == 1 and "use --phase_times" in caught.value.problems[0]


def test_good_times():
    assert parse_phase_times("replay=6, rollout=4.5 ,reward=1e1") == PhaseTimes(4.5, 10.0, 6.0)


def write_run(folder, waits, age, count=5):
    rows = [
        {
            "step": i + 1,
            "policy_age": age if i else 0,
            "prepare_s": 4.0,
            "reward_wait_s": wait,
            "replay_s": 6.0,
        }
        for i, wait in zip(range(count), itertools.cycle(waits), strict=False)
    ]
    rows[0] |= {"prepare_s": 90.0, "replay_s": 90.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_times_of_a_run_are_medians_without_the_first_update(tmp_path):
    assert measured_phase_times(write_run(tmp_path, [3.0], 0)) == PhaseTimes(4.0, 3.0, 6.0)
    assert measured_phase_times(write_run(tmp_path, [2.0], 1)) == PhaseTimes(4.0, 12.0, 6.0)
    assert measured_phase_times(write_run(tmp_path, [3.0], 0, count=1)).rollout == 90.0


def test_runs_that_do_not_show_their_times_are_one_line(tmp_path, capsys):
    with pytest.raises(UserError, match="never waits for rewards"):
        measured_phase_times(write_run(tmp_path, [0.0], 1))
    with pytest.raises(UserError, match="no reward_wait_s"):
        (tmp_path / "metrics.jsonl").write_text('{"prepare_s": 1, "replay_s": null}\n')
        measured_phase_times(tmp_path)
    for value in ("0", "-3", "NaN", "Infinity", "1" + 400 * "0"):
        row = f'{{"prepare_s": {value}, "replay_s": {value}, "reward_wait_s": 0}}'
        (tmp_path / "metrics.jsonl").write_text(row)
        with pytest.raises(UserError, match=r"a step takes 0 s|has no prepare_s"):
            measured_phase_times(tmp_path)
    assert main(["plan", "--config", CPS, "--nodes", "16", "--from_run", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "has no metrics.jsonl" in error


def test_plan_prints_both_step_times_and_their_ratio(tmp_path, capsys):
    words = ["plan", "--config", CPS, "--nodes", "16"]
    assert main([*words, "--from_run", str(write_run(tmp_path, [5.0], 0))]) == 0
    assert "on-policy 15 s, delayed 10 s, 1.50x faster" in capsys.readouterr().out
    assert main(words) == 0
    assert "step time  unknown: give --phase_times" in capsys.readouterr().out
