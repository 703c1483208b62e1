"""What differs between two runs, by their records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from wan_trainer.digests import text_sha256
from wan_trainer.recording.jsonl import Json, JsonObject
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.recording.run_record import read_run_record
from wan_trainer.types import UserError

# Where a run puts its results and what it is called: two runs never share these.
NAMES_OF_A_RUN = frozenset({"output_dir", "wandb_project", "wandb_run_name", "vbvr_reward_tmp_dir"})
_GROUPS = (
    "algorithm",
    "targets",
    "code",
    "dataset",
    "model",
    "initial_weights",
    "base_lora",
    "evaluator",
    "attention",
    "topology",
    "device",
    "sampler",
    "packages",
)
# Where files lie is no part of what they are; each of these groups has digests.
_PATHS = {"dataset": "path", "model": "path", "initial_weights": "path", "evaluator": "directory"}
ABSENT = "(absent)"


class Difference(NamedTuple):
    """One value that two runs do not share: where it is, and both sides in words."""

    group: str
    key: str
    first: str
    second: str


def load_record(run: Path) -> JsonObject:
    """The record of a run directory, or of its run.json. Raises UserError."""
    path = RunFiles(run).record if run.is_dir() else run
    record = read_run_record(path)
    if record is None:
        raise UserError(f"{path} is not there: name a run's output_dir or its run.json")
    if "config" not in record:
        raise UserError(f"{path} is of a run that never began to train: there is nothing to compare")
    return record


def differences(first: JsonObject, second: JsonObject) -> list[Difference]:
    """What differs between two records, group by group: configuration with sources first, packages last.

    Times, hosts, paths of equal files and the names of the runs are left out.
    """
    found = list(_configuration(first, second))
    for group in _GROUPS:
        left, right = (_comparable(group, record.get(group)) for record in (first, second))
        found += [
            Difference(group, key, left.get(key, ABSENT), right.get(key, ABSENT))
            for key in _in_order(left, right)
            if left.get(key, ABSENT) != right.get(key, ABSENT)
        ]
    return found


def _configuration(first: JsonObject, second: JsonObject) -> Iterator[Difference]:
    sides = [(_object(record.get("config")), _object(record.get("sources"))) for record in (first, second)]
    for key in _in_order(sides[0][0], sides[1][0]):
        values = [values.get(key, ABSENT) for values, _ in sides]
        if key in NAMES_OF_A_RUN or values[0] == values[1]:
            continue
        words = [
            f"{_word(value)} ({sources[key]})" if key in sources else _word(value)
            for value, (_, sources) in zip(values, sides, strict=True)
        ]
        yield Difference("config", key, words[0], words[1])


def _comparable(group: str, value: Json) -> dict[str, str]:
    """The values of a group by dotted key, each in words."""
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if key != _PATHS.get(group)}
        if group == "code":
            # The text of the difference is in the records; here it matters whether there is the same one.
            diff = value.pop("diff", "")
            value["diff"] = f"sha256 {text_sha256(str(diff))[:12]}" if diff else "none"
    return dict(_flattened("", value))


def _flattened(prefix: str, value: Json) -> Iterator[tuple[str, str]]:
    """Leaves by dotted key. A list stays one; null is as good as absent, and older records lack fields."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flattened(f"{prefix}.{key}" if prefix else key, item)
    elif value is not None:
        yield prefix, _word(value)


def _word(value: Json) -> str:
    if isinstance(value, str):
        return value if value else '""'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_word(item) for item in value) + "]"
    return str(value)


def _in_order(left: Mapping[str, object], right: Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys([*left, *right]))


def _object(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}
