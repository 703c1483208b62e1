"""A judge's answer: the form it is asked for, and reading it without ever bending it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from wan_trainer.rewards.judge_rubric import SCORE, Rubric

CRITERIA = "criteria"
LONGEST_ANSWER = 64 * 1024
"""Characters of an answer that are read; max_new_tokens keeps a working judge far below."""

_BRACE_OR_STRING = re.compile(r'[{}]|"(?:[^"\\]|\\.)*"?', re.DOTALL)
_MOST_STARTS = 1000
_TOLERANCE = 1e-4
"""Of the full mark: how far a sum of marks may be from the total, for judges that round."""


class Unusable(Exception):
    """Why an answer is no verdict, in words that the judge can act on."""


@dataclass(frozen=True)
class Marks:
    """A verdict. score: 0 to the full mark. criteria: name -> share of its weight, 0 to 1."""

    score: float
    criteria: Mapping[str, float]


def answer_schema(rubric: Rubric, score_max: float) -> dict[str, Any]:
    """The JSON schema of an answer to `rubric`."""
    properties: dict[str, Any] = {"reason": {"type": "string"}}
    if rubric.criteria:
        marks = {
            name: {
                "type": "object",
                "properties": {
                    "weight": {"type": "number", "enum": [_plain(weight)]},
                    SCORE: {"type": "number", "minimum": 0, "maximum": _plain(weight)},
                },
                "required": ["weight", SCORE],
                "additionalProperties": False,
            }
            for name, weight in rubric.criteria.items()
        }
        properties[CRITERIA] = {
            "type": "object",
            "properties": marks,
            "required": list(marks),
            "additionalProperties": False,
        }
    properties[SCORE] = {"type": "number", "minimum": 0, "maximum": _plain(score_max)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def answer_form(rubric: Rubric, score_max: float) -> str:
    """What the judge is told about the form of its answer."""
    total = (
        f"`{SCORE}` is the sum of the marks of all criteria" if rubric.criteria else f"`{SCORE}` is your mark"
    )
    return (
        "Answer with one JSON object and nothing before or after it. `reason` is one sentence. "
        f"{total}, from 0 to {_plain(score_max)}. The object must satisfy this JSON schema:\n"
        + json.dumps(answer_schema(rubric, score_max), ensure_ascii=False)
    )


def read_answer(text: str, rubric: Rubric, score_max: float) -> Marks:
    """The marks of an answer. Raises Unusable when it has none, or they break the rubric: nothing is clipped.

    A declared criterion must be there, keep its weight, stay within it, and all must sum to the score.
    Criteria that the rubric does not declare are not kept, but must add up where they state weights.
    """
    answer = _the_object(text)
    score = _number(answer.get(SCORE), f"`{SCORE}`", score_max)
    stated = answer.get(CRITERIA)
    if not rubric.criteria:
        _check_undeclared(stated, score, score_max)
        return Marks(score, {})
    if not isinstance(stated, dict):
        raise Unusable(f"`{CRITERIA}` is missing: give each of {', '.join(rubric.criteria)}")
    marks = cast("dict[str, Any]", stated)
    if marks.keys() != rubric.criteria.keys():
        odd = sorted(marks.keys() ^ rubric.criteria.keys())
        raise Unusable(
            f"`{CRITERIA}` must be exactly {', '.join(rubric.criteria)}; wrong: {', '.join(odd[:5])[:200]}"
        )
    earned = {name: _mark(name, marks[name], weight) for name, weight in rubric.criteria.items()}
    _check_sum(earned, score, score_max)
    return Marks(score, {name: earned[name] / weight for name, weight in rubric.criteria.items()})


def _mark(name: str, given: object, weight: float) -> float:
    if not isinstance(given, dict):
        raise Unusable(f"criterion {name} must be an object with `weight` and `{SCORE}`")
    entry = cast("dict[str, Any]", given)
    stated = entry.get("weight", weight)
    if isinstance(stated, bool) or stated != weight:
        raise Unusable(f"criterion {name} has weight {_plain(weight)} and not {str(stated)[:40]}")
    return _number(entry.get(SCORE), f"`{SCORE}` of criterion {name}", weight)


def _check_undeclared(stated: object, score: float, score_max: float) -> None:
    entries = cast("dict[str, Any]", stated) if isinstance(stated, dict) else {}
    weighed = {
        name: entry for name, entry in entries.items() if isinstance(entry, dict) and "weight" in entry
    }
    if not weighed:
        return
    weights = {
        name: _number(entry["weight"], f"weight of criterion {name[:40]}", score_max)
        for name, entry in weighed.items()
    }
    if abs(math.fsum(weights.values()) - score_max) > _TOLERANCE * score_max:
        raise Unusable(f"the weights of the criteria must sum to {_plain(score_max)}")
    _check_sum(
        {name: _mark(name[:40], entry, weights[name]) for name, entry in weighed.items()}, score, score_max
    )


def _check_sum(earned: Mapping[str, float], score: float, score_max: float) -> None:
    total = math.fsum(earned.values())
    if abs(total - score) > _TOLERANCE * score_max:
        raise Unusable(f"`{SCORE}` is {score:g}, and the marks of the criteria sum to {total:g}")


def _number(value: object, what: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"{what} must be a number")
    # Compared before it becomes a float: an integer may be too large for one.
    if not 0 <= value <= most:
        raise Unusable(f"{what} must be from 0 to {_plain(most)}")
    return float(value)


def _the_object(text: str) -> dict[str, Any]:
    """The one JSON object with a score in an answer, whatever prose or fence is around it."""
    if len(text) > LONGEST_ANSWER:
        raise Unusable(f"the answer is longer than {LONGEST_ANSWER} characters")
    # Some templates open the thoughts inside the prompt, so that only their end is in the answer.
    rest = text.rpartition("</think>")[2].partition("<think>")[0]
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
    found: list[dict[str, Any]] = []
    position = rest.find("{")
    for _ in range(_MOST_STARTS):
        if position < 0:
            break
        try:
            value, end = decoder.raw_decode(rest, position)
        except (ValueError, RecursionError):
            # Past all of it: the marks inside a broken verdict must not be taken for the verdict.
            end = _closing(rest, position)
        else:
            if isinstance(value, dict) and SCORE in value:
                found.append(cast("dict[str, Any]", value))
        position = rest.find("{", end)
    if not found:
        raise Unusable(f"there is no JSON object with `{SCORE}` in the answer")
    if any(other != found[0] for other in found):
        raise Unusable("the answer holds several different JSON objects")
    return found[0]


def _closing(text: str, start: int) -> int:
    """The index after the brace that closes the one at `start`; the end of the text when none does."""
    depth = 0
    for match in _BRACE_OR_STRING.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
    return len(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are unique: of two scores it cannot be told which one was meant."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is repeated")
    return value


def _plain(number: float) -> int | float:
    """40 rather than 40.0: judges copy what they see."""
    return int(number) if number == int(number) else number
