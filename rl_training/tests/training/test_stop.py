"""A signal to one rank, a lost loss and a failure on one rank: what becomes of the others."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import MeanColour, rows, run, tiny_recipe, write_recipe
from wan_trainer.algorithms.replay import Replayer
from wan_trainer.recording.manifest import verify_checkpoint
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


def _starts(recipe: str, out: str) -> dict[str, Any]:
    """The starts of both runs in one process: their exit statuses, and how the last one failed."""
    seen: dict[str, Any] = {}
    stopped = ["--output_dir", f"{out}/stopped"]
    # Data workers must keep neither a rank that stops nor one that fails.
    workers = ["--num_workers", "1"]
    seen["SIGTERM"] = run(recipe, [*stopped, *workers], _Disturbed("SIGTERM"))
    if os.environ["RANK"] == "0":
        seen["trained"] = [row["batch"] for row in rows(Path(out) / "stopped", "metrics.jsonl")]
        seen["record"] = json.loads((Path(out) / "stopped" / "run.json").read_text())
    # The continued run meets a loss that is not finite on one rank, in its last, delayed batch.
    Replayer._evaluate = _lose_a_sample  # type: ignore[method-assign]
    seen["not finite"] = run(recipe, stopped, MeanColour())
    Replayer._evaluate = _evaluate  # type: ignore[method-assign]
    try:
        run(recipe, ["--output_dir", f"{out}/failed", *workers], _Disturbed("failure"))
    except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
        seen["failure"] = traceback.format_exc()
    return seen


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> tuple[Path, list[dict[str, Any]]]:
    """The directory of both runs, and what each of two ranks came to; both have ended by themselves."""
    out = tmp_path_factory.mktemp("stop")
    values = tiny_recipe(out / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    changed = {"max_steps": BATCHES, "num_epochs": 2, "max_off_policy_steps": 1, "grpo_sample_batch_size": 1}
    recipe = write_recipe(out / "recipe.yaml", {**values, **changed})
    return out, run_ranks(2, _starts, str(recipe), str(out), timeout_s=120)


def test_a_failure_on_one_rank_ends_all_and_the_record_says_where_it_was(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    run_dir = ran[0] / "failed"
    told = [seen["failure"] for seen in ran[1]]
    assert told[1].splitlines()[0].startswith("Traceback") and "RunFailure" not in told[1]
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
    assert f"RunFailure: {reason}\n" in told[0]
    assert not list(run_dir.glob("checkpoint-*"))


def test_a_signal_to_one_rank_in_a_rollout_stops_all_after_saving(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, seen = ran
    trained = AT["SIGTERM"] + 1
    checkpoint = out / "stopped" / f"checkpoint-{trained}"
    verify_checkpoint(checkpoint)
    assert {path.name for path in (out / "stopped").glob("checkpoint-*")} == {
        f"checkpoint-{step}" for step in (trained, BATCHES)
    }
    assert [of_rank["SIGTERM"] for of_rank in seen] == [EXIT_STOPPED] * 2
    # Rank 0 writes them.
    assert seen[0]["trained"] == list(range(trained))
    assert seen[0]["record"]["exit_status"] == EXIT_STOPPED


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    run_dir = ran[0] / "stopped"
    assert [of_rank["not finite"] for of_rank in ran[1]] == [EXIT_DONE] * 2
    metrics = rows(run_dir, "metrics.jsonl")
    assert [row["batch"] for row in metrics] == list(range(BATCHES))
    assert [row["skipped"] for row in metrics] == [False] * (BATCHES - 1) + [True]
    assert not (run_dir / "first_failure.txt").exists()
    state = StoredState(run_dir / f"checkpoint-{BATCHES}")
    for section in ("model", "optimizer"):
        assert all(tensor.isfinite().all() for tensor in state.read(section, state.shapes(section)).values())
