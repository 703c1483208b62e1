"""Delayed replay as a queue: order, lag, and that nothing is ever dropped."""

import pytest

from wan_trainer.training.scheduler import ReplayScheduler


def build(depth: int, accumulate: int = 1):
    log: list[tuple[str, int]] = []

    def prepare(batch: str, step: int) -> int:
        assert batch == f"batch {step}"
        log.append(("prepare", step))
        return step

    def update(rollout: int) -> int | None:
        log.append(("update", rollout))
        return rollout if (rollout + 1) % accumulate == 0 else None

    return ReplayScheduler(prepare, update, depth), log


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("batches", [0, 1, 2, 7])
def test_every_batch_is_updated_once_in_order(depth: int, batches: int) -> None:
    scheduler, log = build(depth)
    records = [record for step in range(batches) for record in scheduler.push(f"batch {step}", step)]
    assert records == list(range(max(0, batches - depth))) and scheduler.pending == min(depth, batches)
    records += list(scheduler.drain())
    assert records == list(range(batches)) and scheduler.pending == 0
    assert list(scheduler.drain()) == []
    assert [step for phase, step in log if phase == "prepare"] == list(range(batches))
    for step in range(batches):
        ahead = log[: log.index(("update", step))].count
        prepared = sum(1 for phase, _ in log[: log.index(("update", step))] if phase == "prepare")
        assert prepared == min(step + depth + 1, batches), ahead


def test_a_drain_in_the_middle_leaves_nothing_behind_and_the_delay_returns() -> None:
    scheduler, log = build(2)
    records: list[int] = []
    for step in range(9):
        records += scheduler.push(f"batch {step}", step)
        if step in (3, 4):
            records += scheduler.drain()
            assert records == list(range(step + 1))
    records += scheduler.drain()
    assert records == list(range(9))
    assert log.index(("prepare", 7)) < log.index(("update", 5))


def test_depth_zero_is_the_synchronous_loop() -> None:
    scheduler, log = build(0)
    for step in range(4):
        assert list(scheduler.push(f"batch {step}", step)) == [step]
    assert log == [(phase, step) for step in range(4) for phase in ("prepare", "update")]


def test_updates_that_only_accumulate_are_not_yielded() -> None:
    scheduler, _ = build(1, accumulate=2)
    records = [record for step in range(6) for record in scheduler.push(f"batch {step}", step)]
    records += list(scheduler.drain())
    assert records == [1, 3, 5]


def test_preparing_does_not_wait_for_the_iterator_and_no_update_is_lost() -> None:
    scheduler, log = build(0)
    abandoned = scheduler.push("batch 0", 0)
    assert log == [("prepare", 0)]
    assert list(scheduler.push("batch 1", 1)) == [0, 1]
    assert list(abandoned) == []
