"""A signal to one rank, and a failure on one rank: what becomes of the others."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.tests.ranks import start_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import MeanColour, rows, run, tiny_recipe, write_recipe
from wan_trainer.algorithms.replay import Replayer
from wan_trainer.recording.manifest import latest_checkpoint, verify_checkpoint
from wan_trainer.training.stored_state import StoredState
from wan_trainer.types import EXIT_DONE, EXIT_STOPPED, Chunk, PendingRewards, RewardRequest, StoredStep

pytestmark = pytest.mark.slow

AT, BATCHES = {"SIGTERM": 1, "failure": 2}, 4


class _Disturbed(MeanColour):
    """A reward during which something happens to rank 1, in the middle of the rollout of a batch of `AT`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        if os.environ["RANK"] == "1" and requests[0].id.step == AT.get(self._what):
            if self._what == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif self._what == "failure":
                raise ZeroDivisionError("a reward that fails")
        return super().submit(videos, requests)


def _lose_a_sample(self: Replayer, chunk: Chunk, step: StoredStep) -> tuple[torch.Tensor, torch.Tensor]:
    """The fault: one rank's log-probabilities of one batch are not finite."""
    new, divergence = _evaluate(self, chunk, step)
    lost = os.environ["RANK"] == "1" and chunk.trajectory.ids[0].step == BATCHES - 1
    return new * float("nan") if lost else new, divergence


_evaluate = Replayer._evaluate


def _start(recipe: str, what: str) -> Any:
    began = time.monotonic()
    if what == "not finite":
        Replayer._evaluate = _lose_a_sample  # type: ignore[method-assign]
    status = run(recipe, [], _Disturbed(what))
    return status, time.monotonic() - began


def _outcomes(recipe: Path, what: str) -> list[Any]:
    """What both ranks of a start came to, within a bounded time."""
    ranks = start_ranks(2, _start, str(recipe), what)
    deadline = time.monotonic() + 120
    answers = [end.recv() if end.poll(max(0, deadline - time.monotonic())) else None for end in ranks.ends]
    for process in ranks.processes:
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()
            answers.append("a process that had to be killed")
    return answers


@pytest.fixture
def recipe(tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit) -> Path:
    values = tiny_recipe(tmp_path / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    changed = {"max_steps": BATCHES, "num_epochs": 2, "max_off_policy_steps": 1, "num_workers": 1}
    return write_recipe(tmp_path / "recipe.yaml", {**values, **changed, "grpo_sample_batch_size": 1})


def test_a_failure_on_one_rank_ends_all_and_the_record_says_where_it_was(
    recipe: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    answers = _outcomes(recipe, "failure")
    assert len(answers) == 2 and all(answer is not None and answer[0] is False for answer in answers), answers
    assert answers[1][1].splitlines()[0].startswith("Traceback") and "RunFailure" not in answers[1][1]
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["status"], record["exit_status"]) == ("failed", 1)
    sample = {row["prompt"]: row["sample_id"] for row in rows(run_dir, "rewards.jsonl") if row["step"] == 0}
    assert sample
    reason = record["reason"]
    assert reason.startswith(
        f"ZeroDivisionError: a reward that fails (rank 1, phase submit, step {AT['failure']}, samples "
    )
    assert "/" in reason.partition("samples ")[2]
    # The rank that only missed the other one says what that one said.
    assert f"RunFailure: {reason}\n" in answers[0][1]
    assert not list(run_dir.glob("checkpoint-*"))


def test_a_signal_to_one_rank_in_a_rollout_stops_all_after_saving(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    answers = _outcomes(recipe, "SIGTERM")
    assert [answer[1][0] for answer in answers] == [EXIT_STOPPED] * 2, answers
    checkpoint = latest_checkpoint(run_dir)
    trained = AT["SIGTERM"] + 1
    assert checkpoint is not None and checkpoint.name == f"checkpoint-{trained}"
    verify_checkpoint(checkpoint)
    assert [row["batch"] for row in rows(run_dir, "metrics.jsonl")] == list(range(trained))
    assert json.loads((run_dir / "run.json").read_text())["exit_status"] == EXIT_STOPPED

    # The continued run meets a loss that is not finite on one rank, in its last, delayed batch.
    answers = _outcomes(recipe, "not finite")
    assert [answer[1][0] for answer in answers] == [EXIT_DONE] * 2, answers
    assert [row["batch"] for row in rows(run_dir, "metrics.jsonl")] == list(range(BATCHES))
    assert [row["skipped"] for row in rows(run_dir, "metrics.jsonl")] == [False] * (BATCHES - 1) + [True]
    assert not (run_dir / "first_failure.txt").exists()
    state = StoredState(run_dir / f"checkpoint-{BATCHES}")
    for section in ("model", "optimizer"):
        assert all(tensor.isfinite().all() for tensor in state.read(section, state.shapes(section)).values())
