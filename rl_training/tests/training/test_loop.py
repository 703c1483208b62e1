"""Boundaries, drains, saves and agreed stops, counted in batches."""

from __future__ import annotations

import pytest

from wan_trainer.training.loop import Boundaries, run_loop
from wan_trainer.training.run_lock import RunLock
from wan_trainer.training.scheduler import ReplayScheduler
from wan_trainer.types import PromptBatch, UserError


def _run(
    depth: int, boundaries: Boundaries, start: int = 0, stop_at: int | None = None
) -> tuple[list[str], bool]:
    log: list[str] = []
    seen = [start]

    def prepare(batch: PromptBatch, step: int) -> int:
        seen[0] = step + 1
        log.append(f"prepare {step}")
        return step

    def update(step: int) -> int:
        log.append(f"update {step}")
        return step

    finished = run_loop(
        (PromptBatch(step, 0, (), {}) for step in range(start, boundaries.total)),
        ReplayScheduler(prepare, update, depth),  # type: ignore[arg-type]
        boundaries,
        record=lambda record: log.append(f"record {record}"),
        save=lambda step: log.append(f"save {step}"),
        stop_requested=lambda: stop_at is not None and seen[0] >= stop_at,
    )
    return log, finished


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_every_batch_is_trained_once_and_saves_come_at_exact_steps(depth: int) -> None:
    log, finished = _run(
        depth, Boundaries(total=10, save_steps=4, accumulation=1, batch_size=3, dataset_size=9)
    )
    assert finished
    assert [line for line in log if line.startswith("update")] == [f"update {step}" for step in range(10)]
    for saved in (4, 8, 10):
        before = log[: log.index(f"save {saved}")]
        assert sum(line.startswith("update") for line in before) == saved
    assert sum(line.startswith("save") for line in log) == 3


def test_an_epoch_end_drains_without_a_save() -> None:
    # 9 samples in batches of 3: the epoch ends behind batches 3, 6 and 9.
    log, _ = _run(1, Boundaries(total=9, save_steps=0, accumulation=1, batch_size=3, dataset_size=9))
    assert log.index("update 2") < log.index("prepare 3")
    assert log.index("update 3") > log.index("prepare 4")
    assert [line for line in log if line.startswith("save")] == ["save 9"]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_agreed_stop_drains_and_saves_between_updates(depth: int) -> None:
    log, finished = _run(
        depth, Boundaries(total=10, save_steps=0, accumulation=2, batch_size=1, dataset_size=100), stop_at=3
    )
    assert not finished
    assert log[-1] == "save 4"
    assert sum(line.startswith("update") for line in log) == 4


def test_a_stop_asked_for_at_the_last_batch_is_a_finished_run() -> None:
    _, finished = _run(
        0, Boundaries(total=2, save_steps=0, accumulation=1, batch_size=1, dataset_size=9), stop_at=2
    )
    assert finished


def test_one_run_per_output_directory(tmp_path) -> None:  # type: ignore[no-untyped-def]
    lock = RunLock(tmp_path / "run")
    with pytest.raises(UserError, match="is in use by process"):
        RunLock(tmp_path / "run")
    lock.release()
    RunLock(tmp_path / "run").release()
