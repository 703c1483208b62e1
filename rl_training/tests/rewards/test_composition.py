"""Several rewards in one run: what is summed, what is only logged, what a missing verdict does to each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from wan_trainer.rewards.composition import ComposedReward, NamedReward
from wan_trainer.types import RewardRequest, RewardResult, Sample, SampleId

VIDEOS = np.zeros((3, 5, 4, 4, 3), np.uint8)
REQUESTS = [RewardRequest(SampleId(7, 0, m), Sample("task/0", "task", "move")) for m in range(3)]
Answer = Callable[[SampleId], RewardResult | None]


@dataclass
class Given:
    """A reward that answers by rule, in any order."""

    answer: Answer
    backwards: bool = False
    closed: int = 0
    submissions: list[tuple[SampleId, ...]] = field(default_factory=list)

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> Given:
        assert len(videos) == len(requests)
        self.submissions.append(tuple(request.id for request in requests))
        return self

    def result(self) -> list[RewardResult]:
        ids = self.submissions[-1]
        results = [result for id_ in ids if (result := self.answer(id_)) is not None]
        return results[::-1] if self.backwards else results

    def close(self) -> None:
        self.closed += 1


def scores(*values: float, **components: float) -> Answer:
    return lambda id_: RewardResult(id_, values[id_.member], components, started=1.0, ended=2.0 + id_.member)


def compose(*parts: NamedReward) -> list[RewardResult]:
    return ComposedReward(parts).submit(VIDEOS, REQUESTS).result()


def test_the_reward_is_the_weighted_sum_and_every_component_is_kept():
    rule = NamedReward("rule", Given(scores(0.2, 0.4, 0.6, score=0.5, motion=0.1)), 0.75, "rule.")
    judge = NamedReward("judge", Given(scores(1.0, 0.0, 0.5), backwards=True), -0.25, "judge.")
    results = compose(rule, judge)
    assert [result.id for result in results] == [request.id for request in REQUESTS]
    assert [result.reward for result in results] == pytest.approx([-0.1, 0.3, 0.325])
    assert results[0].components == {"rule.score": 0.5, "rule.motion": 0.1, "judge.score": 1.0}
    assert [(result.started, result.ended) for result in results] == [(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda id_: RewardResult(id_, math.nan, error="timed out"), "judge: timed out"),
        (lambda id_: RewardResult(id_, math.inf), "judge: reward is not finite (inf)"),
        (lambda id_: None, "judge: gave no verdict"),
    ],
)
def test_without_one_of_its_rewards_a_rollout_is_missing_and_keeps_the_others_scores(answer: Answer, reason):
    rule = NamedReward("rule", Given(scores(0.2, 0.4, 0.6)), 1.0, "rule.")
    some = Given(lambda id_: answer(id_) if id_.member == 1 else RewardResult(id_, 0.5))
    results = compose(rule, NamedReward("judge", some, 1.0, "judge."))
    assert [result.valid for result in results] == [True, False, True]
    assert results[1].error == reason and math.isnan(results[1].reward)
    assert results[1].components == {"rule.score": 0.4}

    # The same verdict of a reward that is only logged costs nothing but itself.
    results = compose(rule, NamedReward("judge", some, None, "monitor.judge."))
    assert [result.reward for result in results] == [0.2, 0.4, 0.6]
    assert results[1].components == {"rule.score": 0.4, "monitor.judge.missing": 1.0}
    assert results[2].components["monitor.judge.missing"] == 0.0
    assert results[2].components["monitor.judge.score"] == 0.5


@dataclass
class Broken(Given):
    """A monitor that keeps to no interface."""

    where: str = ""

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> Given:
        if self.where == "submit":
            raise RuntimeError("no service")
        return super().submit(videos, requests)

    def result(self) -> list[RewardResult]:
        raise RuntimeError("no answer")


@pytest.mark.parametrize(("where", "words"), [("submit", "no service"), ("result", "no answer")])
def test_a_monitor_that_fails_costs_no_run_and_a_trained_reward_does(where, words, caplog):
    rule = NamedReward("rule", Given(scores(0.2, 0.4, 0.6)), 1.0, "rule.")
    broken = Broken(scores(0, 0, 0), where=where)
    results = compose(rule, NamedReward("watch", broken, None, "monitor.watch."))
    assert [result.reward for result in results] == [0.2, 0.4, 0.6]
    assert all(result.valid and result.components["monitor.watch.missing"] == 1.0 for result in results)
    assert words in caplog.text and "watch" in caplog.text
    with pytest.raises(RuntimeError, match=words):
        compose(rule, NamedReward("watch", broken, 1.0, "watch."))


@pytest.mark.parametrize("weights", [(1e308, 1e308), (1e308, -1e308), (4e307, 1e308)])
def test_a_sum_that_is_no_number_is_a_missing_reward(weights):
    parts = [NamedReward(str(i), Given(scores(9, 9, 9)), w, f"{i}.") for i, w in enumerate(weights)]
    for result in compose(*parts):
        assert (
            not result.valid and result.error is not None and "the weighted sum is not finite" in result.error
        )


def test_every_part_is_asked_once_and_closed_once():
    parts = [Given(scores(0, 0, 0)), Given(scores(0, 0, 0))]
    composed = ComposedReward([NamedReward(str(i), part, 1.0, f"{i}.") for i, part in enumerate(parts)])
    pending = composed.submit(VIDEOS, REQUESTS)
    pending.result()
    composed.close()
    assert [len(part.submissions) for part in parts] == [1, 1]
    assert [part.closed for part in parts] == [1, 1]
