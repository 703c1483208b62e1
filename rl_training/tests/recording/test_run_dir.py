import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from wan_trainer.config.specs import OutputSpec
from wan_trainer.recording.clock import Span
from wan_trainer.recording.console import console_for
from wan_trainer.recording.jsonl import RowReader
from wan_trainer.recording.opening import open_run_log
from wan_trainer.recording.rows import parse_video_name, reward_rows, video_name
from wan_trainer.recording.run_dir import NullRunLog, RunWriter
from wan_trainer.types import (
    EvaluationRecord,
    RewardResult,
    RewardTable,
    Sample,
    SampleId,
    StepRecord,
    UserError,
)

MakeRecord = Callable[..., StepRecord]


def table_of(step: int) -> tuple[list[Sample], RewardTable]:
    samples = [Sample("pick/a1", "pick", "take it"), Sample("place/b2", "place", "put ☃ there")]
    good = RewardResult(SampleId(step, 0, 0), 0.75, {"task_specific": 0.75}, None, 10.0, 12.5)
    missing = RewardResult(SampleId(step, 0, 1), math.nan, {}, "timeout after 5 s", 10.0, 15.0)
    nan = RewardResult(SampleId(step, 1, 0), math.nan, {"task_specific": math.nan}, None, 1.0, 2.0)
    contradictory = RewardResult(SampleId(step, 1, 1), 0.5, {}, "scorer exited with status 9")
    return samples, RewardTable((0, 1), ((good, missing), (nan, contradictory)))


def write_batches(log: RunWriter, batches: int, make: MakeRecord, *, updates_per_batch: int = 1) -> None:
    for batch in range(batches):
        samples, table = table_of(batch)
        log.rewards(reward_rows(samples, table))
        log.spans([Span(0, "prepare", batch, 100.0 + batch, 100.5 + batch)])
        log.files.rollout_video(SampleId(batch, 0, 0)).write_bytes(b"mp4")
        for update in range(updates_per_batch):
            log.step(make(step=batch * updates_per_batch + update + 1, batch=batch))


def test_metrics_hold_every_field_strictly(tmp_path: Path, step_record: MakeRecord) -> None:
    log = RunWriter(tmp_path)
    log.step(step_record(grad_norm=math.nan, replayed_per_expert={"transformer": 16}))
    log.close(0)
    (row,) = RowReader(log.files.metrics)
    assert set(row) == {field.name for field in fields(StepRecord)}
    assert row["policy_loss"] == -1.23456789012e-7
    assert row["grad_norm"] is None
    assert row["components"] == {"task_specific": 0.5}
    assert row["replayed_per_expert"] == {"transformer": 16}


def test_rewards_and_their_errors(tmp_path: Path) -> None:
    log = RunWriter(tmp_path)
    samples, table = table_of(4)
    log.rewards(reward_rows(samples, table))
    log.close(0)
    rows = list(RowReader(log.files.rewards))
    assert rows[0] == {
        "step": 4,
        "task": "pick",
        "sample_id": "pick/a1",
        "prompt": 0,
        "member": 0,
        "reward": 0.75,
        "components": {"task_specific": 0.75},
        "seconds": 2.5,
        "error": None,
    }
    assert [row["reward"] for row in rows] == [0.75, None, None, None]
    errors = list(RowReader(log.files.reward_errors))
    assert [(row["sample_id"], row["member"], row["reason"]) for row in errors] == [
        ("pick/a1", 1, "timeout after 5 s"),
        ("place/b2", 0, "reward is not finite (nan)"),
        ("place/b2", 1, "scorer exited with status 9"),
    ]
    assert {row["step"] for row in errors} == {4}


@pytest.mark.parametrize("updates_per_batch", [1, 2])
def test_truncation_reaches_every_file_and_the_run_goes_on(
    tmp_path: Path, step_record: MakeRecord, updates_per_batch: int
) -> None:
    whole, resumed = RunWriter(tmp_path / "whole"), RunWriter(tmp_path / "resumed")
    write_batches(whole, 3, step_record, updates_per_batch=updates_per_batch)
    whole.close(0)
    write_batches(resumed, 5, step_record, updates_per_batch=updates_per_batch)
    resumed.close(1)
    with resumed.files.metrics.open("ab") as torn:
        torn.write(b'{"step": 6, "bat')
    (resumed.files.videos / "mine.mp4").write_bytes(b"keep")

    again = RunWriter(tmp_path / "resumed")
    again.truncate_after(3)
    again.close(0)
    (resumed.files.videos / "mine.mp4").unlink()
    for path in sorted(item for item in (tmp_path / "whole").rglob("*") if item.is_file()):
        assert path.read_bytes() == (tmp_path / "resumed" / path.relative_to(tmp_path / "whole")).read_bytes()
    assert len(list(again.files.videos.iterdir())) == 3


def test_an_evaluation_belongs_to_the_batches_before_it(
    tmp_path: Path, evaluation_record: EvaluationRecord
) -> None:
    log = RunWriter(tmp_path)
    for batch in (0, 2, 4):
        log.evaluation(replace(evaluation_record, batch=batch))
        log.files.evaluation_video(batch, 0).write_bytes(b"mp4")
    log.close(0)
    assert log.files.evaluation_video(4, 12).name == "eval-000004-p12.mp4"
    for batches, left in ((2, [0, 2]), (1, [0]), (0, [])):
        again = RunWriter(tmp_path)
        again.truncate_after(batches)
        again.close(0)
        assert [row["batch"] for row in RowReader(log.files.evaluations)] == left
        assert sorted(path.name for path in log.files.videos.iterdir()) == [
            f"eval-{batch:06d}-p00.mp4" for batch in left
        ]


def test_video_names_come_from_numbers_only() -> None:
    assert video_name(SampleId(10, 0, 3)) == "step-000010-p00-m03.mp4"
    assert video_name(SampleId(1234567, 128, 100)) == "step-1234567-p128-m100.mp4"
    for sample in (SampleId(10, 0, 3), SampleId(1234567, 128, 100)):
        assert parse_video_name(video_name(sample)) == sample
    assert parse_video_name("step-10-p0-m3.mp4") is None
    assert parse_video_name("x-step-000010-p00-m03.mp4") is None


def test_other_ranks_write_nothing(tmp_path: Path, step_record: MakeRecord) -> None:
    log = NullRunLog(tmp_path / "run")
    samples, table = table_of(0)
    log.step(step_record())
    log.rewards(reward_rows(samples, table))
    log.spans([])
    log.close(0)
    assert not (tmp_path / "run").exists()


def test_an_output_dir_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output_dir .*file/run cannot be written .*choose another"):
        RunWriter(tmp_path / "file" / "run")


class Follower:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def step(self, record: StepRecord) -> None:
        self.seen.append(record.step)

    def close(self, exit_status: int) -> None:
        self.seen.append(-exit_status)


def test_observers_follow_and_are_closed_once(tmp_path: Path, step_record: MakeRecord) -> None:
    follower = Follower()
    log = RunWriter(tmp_path)
    log.observe(follower)
    log.step(step_record(step=1))
    log.step(step_record(step=2, batch=1))
    log.close(75)
    log.close(75)
    assert follower.seen == [1, 2, -75]


def test_opening_cuts_back_and_prints_plain_lines(
    tmp_path: Path, step_record: MakeRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    old = RunWriter(tmp_path)
    write_batches(old, 4, step_record)
    old.close(1)
    output = OutputSpec(tmp_path, True, 10, 2, 3, 1, None, None)
    log = open_run_log(output, rank=0, console=console_for(0), config={}, total_batches=6, start_batch=2)
    for batch in range(2, 6):
        log.step(step_record(step=batch + 1, batch=batch, ratio_max_dev=1.5e-7))
    log.close(0)
    assert [row["step"] for row in RowReader(log.files.metrics)] == [1, 2, 3, 4, 5, 6]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == ["3/6", "4/6", "6/6"]
    assert "ratio dev 1.50e-07 (on-policy)" in lines[0]
    assert not (tmp_path / "wandb").exists()

    silent = open_run_log(output, rank=1, console=console_for(1), config={}, total_batches=6, start_batch=2)
    silent.step(step_record())
    assert capsys.readouterr().err == ""
    assert len(json.loads("[" + ",".join(log.files.metrics.read_text().splitlines()) + "]")) == 6
