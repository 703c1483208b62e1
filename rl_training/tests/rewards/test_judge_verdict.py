"""Reading a judge's answer, and the rubrics it answers to."""

from __future__ import annotations

import json

import pytest

from wan_trainer.digests import files_sha256
from wan_trainer.rewards.judge_rubric import Rubric, generic_rubric, parse_rubric, rubrics_sha256
from wan_trainer.rewards.judge_verdict import Marks, Unusable, answer_schema, read_answer
from wan_trainer.types import UserError

PLAIN = Rubric("plain", "How good is it?")
WEIGHED = Rubric("weighed", "How good is it?", {"a": 60.0, "b": 40.0})


def weighed(score: object = 50, a: object = 30, b: object = 20, **weights: object) -> dict:
    marks = {"a": {"weight": 60, "score": a}, "b": {"weight": 40, "score": b}}
    for name, weight in weights.items():
        marks[name]["weight"] = weight
    return {"criteria": marks, "score": score}


@pytest.mark.parametrize(
    "text",
    [
        '{"score": 50}',
        'Here it is:\n```json\n{"reason": "a } in text", "score": 50.0}\n```\nAll in all good.',
        '<think>{"score": 3} or {"score": 90}?</think>{"score": 50}',
        'maybe {"score": 3}</think> {"score": 50}',
        '```json\n```json\n{"score": 50}\n```\n```',
        '\ufeff[{"score": 5e1}]',
        '{"set": {1, 2}} is not it, {"score": 50} is',
        '{"score": 50} and again {"score": 50}',
        '{"score": 50, "criteria": ["all good"]}',
        json.dumps({"score": 50, "criteria": {"x": {"weight": 100, "score": 50}}}),
    ],
)
def test_a_verdict_is_found_in_what_judges_write_around_it(text):
    assert read_answer(text, PLAIN, 100.0) == Marks(50.0, {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON object"),
        ("85", "no JSON object"),
        ('{"Score": 50}', "no JSON object"),
        ('{"score": "50"}', "must be a number"),
        ('{"score": true}', "must be a number"),
        ('{"score": \uff15\uff10}', "no JSON object"),
        ('{"score": 050}', "no JSON object"),
        ('{"score": ' + "9" * 5000 + "}", "no JSON object"),
        ('{"criteria": {"x": {"weight": 100, "score": 50, "score": 10}}, "score": 50}', "no JSON object"),
        ('{"score": 50, "criteria": {"x": {"weight": true, "score": 50}}}', "must be a number"),
        ('{"score": null}', "must be a number"),
        ('{"score": NaN}', "no JSON object"),
        ('{"score": 1e999}', "must be from 0 to 100"),
        ('{"score": ' + "9" * 400 + "}", "must be from 0 to 100"),
        ('{"score": 100.001}', "must be from 0 to 100"),
        ('{"score": -0.001}', "must be from 0 to 100"),
        ('{"score": 10, "score": 90}', "no JSON object"),
        ('{"score": 10} {"score": 90}', "several different"),
        ('<think>{"score": 50}', "no JSON object"),
        ("{" * 5000, "no JSON object"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "no JSON object"),
        ("x" * (1 << 17), "longer than"),
        # A broken verdict: the marks inside it are not the verdict.
        ('{"criteria": {"a": {"weight": 60, "score": 30}}, "score": 50', "no JSON object"),
        ('{"reason": "}", oops, "a": {"weight": 60, "score": 30}, "score": 50}', "no JSON object"),
        (json.dumps({"score": 50, "criteria": {"x": {"weight": 90, "score": 50}}}), "must sum to 100"),
        (json.dumps({"score": 50, "criteria": {"x": {"weight": 100, "score": 40}}}), "sum to 40"),
    ],
)
def test_what_is_no_verdict_is_said_and_never_bent(text, why):
    with pytest.raises(Unusable, match=why):
        read_answer(text, PLAIN, 100.0)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"score": 50}, "`criteria` is missing"),
        ({"score": 50, "criteria": {"a": {"score": 50}}}, "wrong: b"),
        ({"score": 50, "criteria": {**weighed()["criteria"], "c": 1}}, "wrong: c"),
        ({"score": 50, "criteria": {"a": 30, "b": 20}}, "must be an object"),
        (weighed(a=61), "from 0 to 60"),
        (weighed(b=-1, score=29), "from 0 to 40"),
        (weighed(a=60), "sum to 80"),
        (weighed(a=50, b=50), "weight|from 0 to 40"),
        (weighed(score=51), "sum to 50"),
        (weighed(a=None), "must be a number"),
    ],
)
def test_the_marks_of_declared_criteria_must_follow_the_rubric(answer, why):
    with pytest.raises(Unusable, match=why):
        read_answer(json.dumps(answer), WEIGHED, 100.0)


def test_marks_become_shares_of_their_weights():
    assert read_answer(json.dumps(weighed()), WEIGHED, 100.0) == Marks(50.0, {"a": 0.5, "b": 0.5})
    answer = weighed(a=20, b=20.004, score=40.004)
    del answer["criteria"]["a"]["weight"]
    assert read_answer(json.dumps(answer), WEIGHED, 100.0).criteria["a"] == pytest.approx(1 / 3)
    # Judges that round their marks are within the tolerance.
    assert read_answer(json.dumps(weighed(a=33.333, b=16.667, score=50)), WEIGHED, 100.0).score == 50


def test_the_generic_rubric_has_a_hundred_points_and_asks_for_each_in_its_schema():
    rubric = generic_rubric(100.0)
    assert sum(rubric.criteria.values()) == 100
    for name, weight in rubric.criteria.items():
        assert f"{name} (up to {weight:g})" in rubric.text
    schema = answer_schema(rubric, 100.0)
    assert schema["properties"]["criteria"]["required"] == list(rubric.criteria)
    assert schema["required"] == ["reason", "criteria", "score"] and not schema["additionalProperties"]
    with pytest.raises(UserError, match="sum to 100, vlm_reward_score_max is 10"):
        generic_rubric(10.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("---\ncriteria: {a: 100}\n---\n \n", "is empty"),
        ("---\ncriteria: {a: 100}\nHow good?", "no closing line"),
        ("---\ncriteria: {a: 60, b: 30}\n---\nHow good?", "sum to 90"),
        ("---\ncriteria: {a: 110, b: -10}\n---\nHow good?", "positive weight"),
        ("---\ncriteria: {score: 100}\n---\nHow good?", "none of them score"),
        ("---\nweights: {a: 100}\n---\nHow good?", "head must be"),
        ("---\n{a: [\n---\nHow good?", "head must be"),
        ("---\n" + "{" * 2000 + "\n---\nHow good?", "head must be"),
        ("---\ncriteria: {2001-02-30: 100}\n---\nHow good?", "head must be"),
        ("---\ncriteria: {a: " + "9" * 400 + "}\n---\nHow good?", "positive weight"),
        ("---\ncriteria: {a: .nan}\n---\nHow good?", "positive weight"),
    ],
)
def test_a_rubric_that_cannot_be_used_is_refused(text, why):
    with pytest.raises(UserError, match=why):
        parse_rubric("task", text, 100.0)


def test_the_digest_of_rubrics_follows_names_and_contents(tmp_path):
    (tmp_path / "sub").mkdir()
    names = ["b.md", "a.md", "sub/notes"]
    for name in names:
        (tmp_path / name).write_text(name)
    expected = files_sha256((name, tmp_path / name) for name in sorted(names))
    assert rubrics_sha256(tmp_path) == expected
    (tmp_path / ".hidden").write_text("an editor's")
    assert rubrics_sha256(tmp_path) == expected
    (tmp_path / "a.md").rename(tmp_path / "c.md")
    assert rubrics_sha256(tmp_path) != expected
    with pytest.raises(UserError, match="is no directory"):
        rubrics_sha256(tmp_path / "absent")
