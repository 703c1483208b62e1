"""The paths of a config that does not load: what is missing can be said together with what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from wan_trainer.config.paths import find_config, trainer_path
from wan_trainer.preflight.problem import Problem
from wan_trainer.types import UserError

_REMEDIES = {
    "model_path": "put a Diffusers-format Wan pipeline there, or set --model_path",
    "dataset_json": "unpack the data with `wan-trainer unpack`, or set --dataset_json",
    "vbvr_reward_evalkit_dir": "check the evaluator out there, or set --vbvr_reward_evalkit_dir",
}


def check_named_paths(config: str, overrides: Sequence[str], said: Sequence[str]) -> list[Problem]:
    """One line per input path that is stated and does not exist, unless a line of `said` is about its key."""
    values = {**_yaml_values(config), **_override_values(overrides)}
    problems: list[Problem] = []
    for key, remedy in _REMEDIES.items():
        value = values.get(key)
        # An interpolated value needs the config's own rules, and those did not get that far.
        if (
            not isinstance(value, str)
            or not value
            or "${" in value
            or any(line.startswith(key) for line in said)
        ):
            continue
        path = trainer_path(value)
        if not path.exists():
            problems.append(Problem(f"{key}: {path} does not exist: {remedy}"))
    return problems


def _yaml_values(config: str) -> Mapping[str, object]:
    try:
        content = yaml.safe_load(find_config(config).read_text(encoding="utf-8"))
    except (UserError, OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _override_values(overrides: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for position, argument in enumerate(overrides):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument[2:].partition("=")
        if equals:
            values[name] = value
        elif position + 1 < len(overrides):
            values[name] = overrides[position + 1]
    return values
