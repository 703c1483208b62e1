"""Waves and delay on two ranks: what is scored while what replays, and rewards that do not fit a wave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.runs import (
    MeanColour,
    Scored,
    brightness,
    rows,
    run,
    tiny_recipe,
    write_recipe,
)
from wan_trainer.types import EXIT_DONE, PendingRewards, RewardRequest, RewardResult, RunFailure

ONE_PROMPT_WAVES = ["--grpo_shared_prompt_microbatch_size", "1", "--grpo_sample_batch_size", "1"]
BATCHES = 3


class Latched:
    """A scorer in a thread of its own that is never done before it is asked for its verdict.

    So whatever the trainer does before it asks, it does while that verdict is being worked on: the order is
    the trainer's, not the machine's.
    """

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        return LatchedScore(videos, requests)

    def close(self) -> None:
        """Every thread ended with its verdict."""


class LatchedScore:
    def __init__(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> None:
        self._asked = threading.Event()
        self._results: list[RewardResult] = []
        self._rewards = [brightness(video) for video in videos]
        self._requests = list(requests)
        self._thread = threading.Thread(target=self._score)
        self._thread.start()

    def _score(self) -> None:
        started = time.monotonic()
        assert self._asked.wait(60), "the trainer never asked for this verdict"
        self._results = [
            RewardResult(request.id, reward, started=started, ended=time.monotonic())
            for request, reward in zip(self._requests, self._rewards, strict=True)
        ]

    def result(self) -> list[RewardResult]:
        self._asked.set()
        self._thread.join()
        return self._results


class Altered(MeanColour):
    """A reward whose verdicts rank 1 changes."""

    def __init__(self, change: Callable[[list[RewardResult]], list[RewardResult]]) -> None:
        self._change = change

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        results = super().submit(videos, requests).result()
        return Scored(self._change(results) if os.environ["RANK"] == "1" else results)


def _drop(results: list[RewardResult]) -> list[RewardResult]:
    return []


def _double(results: list[RewardResult]) -> list[RewardResult]:
    return results * 2


def _of_the_other_wave(results: list[RewardResult]) -> list[RewardResult]:
    return [
        RewardResult(result.id._replace(prompt=1 - result.id.prompt), result.reward) for result in results
    ]


def _runs(recipe: str, out: Path) -> dict[str, Any]:
    def overrides(name: str, *more: str) -> list[str]:
        steps = ["--max_steps", str(BATCHES), "--output_dir", str(out / name)]
        return [*ONE_PROMPT_WAVES, *steps, *more]

    seen: dict[str, Any] = {
        "waves": run(recipe, overrides("waves"), Latched()),
        "delayed": run(recipe, overrides("delayed", "--max_off_policy_steps", "1"), Latched()),
    }
    for change in (_drop, _double, _of_the_other_wave):
        try:
            seen[change.__name__] = run(recipe, overrides(change.__name__), Altered(change))
        except RunFailure as failure:
            seen[change.__name__] = str(failure)
    return seen


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """All runs of this module, in one start of two ranks that each hold one member of every prompt."""
    out = tmp_path_factory.mktemp("waves")
    recipe = tiny_recipe(out / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    return out, run_ranks(2, _runs, str(write_recipe(out / "recipe.yaml", recipe)), out)


def _spans(run_dir: Path, rank: int, phase: str, batch: int) -> list[tuple[float, float]]:
    """Start and end of every such span, by start."""
    wanted = {"rank": rank, "phase": phase, "step": batch}
    return sorted(
        (row["start"], row["end"]) for row in rows(run_dir, "timeline.jsonl") if wanted.items() <= row.items()
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_second_wave_is_scored_while_the_first_is_replayed(
    ran: tuple[Path, list[dict[str, Any]]], rank: int
) -> None:
    out, seen = ran
    assert [ranks["waves"] for ranks in seen] == [EXIT_DONE] * 2
    for batch in range(BATCHES):
        first, second = _spans(out / "waves", rank, "score", batch)
        replayed, replayed_later = _spans(out / "waves", rank, "replay", batch)
        assert first[1] <= replayed[0], "a wave is replayed once its own rewards are in"
        assert second[0] < replayed[0] and replayed[1] < second[1] <= replayed_later[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_delayed_batch_is_scored_while_the_next_is_drawn_and_the_last_replayed(
    ran: tuple[Path, list[dict[str, Any]]], rank: int
) -> None:
    out, seen = ran
    assert [ranks["delayed"] for ranks in seen] == [EXIT_DONE] * 2
    for batch in range(1, BATCHES):
        scored = _spans(out / "delayed", rank, "score", batch)
        assert len(scored) == 2
        for start, end in scored:
            for before in _spans(out / "delayed", rank, "replay", batch - 1):
                assert start < before[0] and before[1] < end
            if batch + 1 < BATCHES:
                ((drawn, ready),) = _spans(out / "delayed", rank, "prepare", batch + 1)
                assert start < drawn and ready < end


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop, "no verdict on (prompt 0, member 1)"),
        (_double, "more than one verdict on (prompt 0, member 1)"),
        (_of_the_other_wave, "verdicts on samples of no prompt of this wave: (prompt 1, member 1)"),
    ],
)
def test_a_wave_without_exactly_its_verdicts_stops_every_rank(
    ran: tuple[Path, list[dict[str, Any]]], change: Callable[..., Any], words: str
) -> None:
    out, seen = ran
    for ranks in seen:
        message = ranks[change.__name__]
        assert isinstance(message, str) and words in message, message
    assert not (out / change.__name__ / "metrics.jsonl").read_text()
