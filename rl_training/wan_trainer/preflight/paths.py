"""The paths of a config that does not load: what is missing can be said together with what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from wan_trainer.config.paths import find_config, trainer_path
from wan_trainer.config.schema import keys
from wan_trainer.config.text import parse_flags, read_yaml
from wan_trainer.preflight.finding import Finding
from wan_trainer.types import UserError

_REMEDIES = {
    "model_path": "put a Diffusers-format Wan pipeline there, or set --model_path",
    "dataset_json": "unpack the data with `wan-trainer unpack`, or name a dataset.json or a prompt list",
    "eval_dataset_json": "name a prompt list or a dataset.json of held prompts",
    "vbvr_reward_evalkit_dir": "check the evaluator out there, or set --vbvr_reward_evalkit_dir",
}


def check_named_paths(config: str, overrides: Sequence[str], said: Sequence[str]) -> list[Finding]:
    """One line per input path that is stated and does not exist, unless a line of `said` is about its key."""
    known = keys()
    values = dict(parse_flags(overrides, known).values)
    # A file that is not there is among the lines of `said`.
    with suppress(UserError):
        values = read_yaml(find_config(config), known).values | values
    problems: list[Finding] = []
    for key, remedy in _REMEDIES.items():
        value = values.get(key)
        if not isinstance(value, str) or not value or any(line.startswith(key) for line in said):
            continue
        path = trainer_path(value)
        if not path.exists():
            problems.append(Finding(f"{key}: {path} does not exist: {remedy}"))
    return problems
