"""Boundaries, drains, saves and agreed stops, counted in batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.training.evaluation import due_at_start
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
        evaluate=lambda step: log.append(f"evaluate {step}"),
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


@pytest.mark.parametrize("depth", [0, 1])
def test_evaluations_come_at_their_batches_and_at_the_end_and_change_nothing_else(depth: int) -> None:
    bounds = Boundaries(total=10, save_steps=4, accumulation=2, batch_size=3, dataset_size=9)
    plain, _ = _run(depth, bounds)
    evaluated, _ = _run(depth, replace(bounds, eval_steps=4))
    assert [line for line in evaluated if not line.startswith("evaluate")] == plain
    # With a delay they empty no queue: only where a save has emptied it is the last batch updated before.
    assert [line for line in evaluated if line.startswith("evaluate")] == [
        f"evaluate {n}" for n in (4, 8, 10)
    ]
    for seen in (4, 8, 10):
        assert evaluated.index(f"evaluate {seen}") == evaluated.index(f"save {seen}") + 1
    often, _ = _run(depth, replace(bounds, eval_steps=2))
    assert often[often.index("evaluate 2") - 1] == ("record 1" if depth == 0 else "record 0")


def test_a_run_that_stops_leaves_its_evaluation_to_the_next_start(tmp_path: Path) -> None:
    bounds = Boundaries(total=10, save_steps=0, accumulation=2, batch_size=1, dataset_size=100, eval_steps=4)
    log, _ = _run(0, bounds, stop_at=3)
    assert log[-1] == "save 4"
    files = RunFiles(tmp_path)
    assert due_at_start(files, 4, 0) and due_at_start(files, 4, 3)
    files.evaluations.write_text('{"batch": 0}\n{"batch": 2}\n')
    assert due_at_start(files, 4, 4) and not due_at_start(files, 4, 3)
    assert not due_at_start(files, 2, 2)


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
