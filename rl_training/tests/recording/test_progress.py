import io
import math
from collections.abc import Callable

import pytest
from rich.console import Console

from wan_trainer.recording.console import console_for
from wan_trainer.recording.progress import ProgressDisplay, describe, format_duration
from wan_trainer.types import EvaluationRecord, StepRecord

MakeRecord = Callable[..., StepRecord]


def test_durations() -> None:
    seconds = (0.4, 59, 61, 3600, 90_061, math.nan)
    expected = ["0 s", "59 s", "1 min 01 s", "1 h 00 min", "1 d 01 h", "?"]
    assert [format_duration(value) for value in seconds] == expected


def test_a_line_says_policy_age_and_what_went_missing(step_record: MakeRecord) -> None:
    line = describe(
        step_record(policy_age=1, ratio_max_dev=0.0123, reward_valid_fraction=0.875, skipped=True)
    )
    assert "(policy age 1)" in line
    assert "ratio dev 1.23e-02" in line
    assert "rewards valid 87.5%" in line
    assert "SKIPPED" in line


def test_a_line_without_a_ratio_names_none(step_record: MakeRecord) -> None:
    none = dict.fromkeys(("ratio_mean", "ratio_max_dev", "clip_fraction", "approx_kl"), math.nan)
    line = describe(step_record(**none, kl_loss=0.0))
    assert "ratio" not in line and "clip" not in line and "nan" not in line and "KL" not in line
    assert "KL loss 2.500e-02" in describe(step_record(**none, kl_loss=0.025))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"grad_norm": math.nan, "frozen_steps": 0}, "gradient not finite"),
        ({"grad_norm": 0.0, "frozen_steps": 16}, "no replayed step reached a trained expert"),
    ],
)
def test_a_skipped_update_says_why(step_record: MakeRecord, changes: dict[str, float], why: str) -> None:
    assert describe(step_record(skipped=True, replayed_steps=16, **changes)).endswith(f"SKIPPED: {why}")


def test_an_evaluation_is_one_line_with_what_went_missing(evaluation_record: EvaluationRecord) -> None:
    text = io.StringIO()
    display = ProgressDisplay(Console(file=text, width=200), total_batches=2, log_steps=0)
    display.evaluation(evaluation_record)
    (line,) = text.getvalue().splitlines()
    for words in (
        "after batch 4",
        "reward 0.5000 ± 0.1000",
        "8 prompts",
        "1 min 01 s",
        "2 rewards missing: ti",
    ):
        assert words in line


def test_log_steps_zero_is_silent(step_record: MakeRecord) -> None:
    text = io.StringIO()
    display = ProgressDisplay(Console(file=text), total_batches=2, log_steps=0)
    display.step(step_record())
    display.close(0)
    assert text.getvalue() == ""


def test_a_terminal_gets_a_bar(step_record: MakeRecord) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=200)
    display = ProgressDisplay(console, total_batches=4, log_steps=1)
    display.step(step_record(batch=2, step=3))
    display.close(0)
    assert "3/4" in text.getvalue()
    assert "reward 0.5000" in text.getvalue()


def test_console_leaves_brackets_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console_for(0).print("[red]/a/[b]/c[/red]")
    console_for(1).print("nothing")
    captured = capsys.readouterr()
    assert captured.err == "[red]/a/[b]/c[/red]\n"
    assert captured.out == ""
