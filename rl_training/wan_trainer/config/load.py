"""From a file and overrides to one checked configuration, with the source of every value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from wan_trainer.config.checks import contradictions
from wan_trainer.config.device import CPU_SOURCE, cpu_changes, resolve_device
from wan_trainer.config.fields import KeyInfo
from wan_trainer.config.paths import find_config
from wan_trainer.config.reward_choice import JUDGE, listed
from wan_trainer.config.schema import DEFER_CHECKS, TrainConfig, keys
from wan_trainer.config.suggest import suggest
from wan_trainer.config.text import Values, parse_flags, read_yaml
from wan_trainer.types import UserError

JUDGE_VARIABLES = {
    "WAN_TRAINER_VLM_BASE_URL": "vlm_reward_base_url",
    "WAN_TRAINER_VLM_MODEL": "vlm_reward_model",
    "WAN_TRAINER_VLM_API_KEY": "vlm_reward_api_key",
}
"""Environment variables that override the file where the judge is in use."""

_WRONG_COUNT = ("missing", "too_long", "tuple_type")
"""What pydantic calls a pair that does not have two members."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where it came from.

    sources: "default", "yaml", "env", "cli" or "device: cpu" for every key. lines: line of a key in the file.
    """

    config: TrainConfig
    sources: Mapping[str, str]
    path: Path
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    overrides: tuple[str, ...] = ()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration of a file and overrides. Raises UserError with every problem, one line each."""
    return load_with_sources(path, overrides).config


def load_with_sources(
    path: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> LoadedConfig:
    """Like `load_config`, with the source of every value.

    Defaults give way to the file, the file to WAN_TRAINER_VLM_* where the judge is in use, all to overrides.
    With `device: cpu` the values that a CPU run changes are already replaced.
    """
    known = keys()
    flags = parse_flags(overrides, known)
    problems: list[str] = []
    found = Values()
    file = Path(path)
    try:
        file = find_config(path, environment)
        found = read_yaml(file, known, environment)
    except UserError as error:
        # Without the file nothing else can be judged but the flags themselves.
        raise UserError(*error.problems, *flags.problems) from None
    problems += found.problems + flags.problems

    sources = dict.fromkeys(known, "default")
    sources |= {name: "env" if name in found.from_env else "yaml" for name in found.values}
    values = {**found.values, **flags.values}
    judge = JUDGE in (*listed(values.get("grpo_reward_fn")), *listed(values.get("reward_monitor")))
    for variable, name in JUDGE_VARIABLES.items():
        if judge and environment.get(variable):
            values[name], sources[name] = environment[variable], "env"
    values |= flags.values
    sources |= dict.fromkeys(flags.values, "cli")

    if values.get("shuffle_raw_indices") is not None and "shuffle" not in values:
        sources["shuffle"] = sources["shuffle_raw_indices"]
    places = _Places(file, sources, found.lines)
    broken = {name for name in found.lines if name in known and name not in found.values}
    config = _build(values, places, problems, broken)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    assert config is not None
    if config.device == "cpu":
        changes = cpu_changes(config)
        config = config.model_copy(update=changes)
        sources |= dict.fromkeys(changes, CPU_SOURCE)
    return LoadedConfig(config, sources, file, found.lines, tuple(overrides))


def settle_device(loaded: LoadedConfig, *, cuda_available: bool) -> LoadedConfig:
    """`loaded` with `device: auto` settled; what a CPU run changes has the source "device: cpu"."""
    settled = resolve_device(loaded.config, cuda_available=cuda_available)
    before, after = loaded.config.model_dump(), settled.model_dump()
    changed = [name for name in after if name != "device" and after[name] != before[name]]
    return replace(loaded, config=settled, sources={**loaded.sources, **dict.fromkeys(changed, CPU_SOURCE)})


@dataclass(frozen=True)
class _Places:
    """Where each key's value stands, as an error names it."""

    file: Path
    sources: Mapping[str, str]
    lines: Mapping[str, int]

    def __getitem__(self, name: str) -> str:
        source = self.sources.get(name, "default")
        if source == "cli":
            return "(command line)"
        if name in self.lines and source in ("yaml", "env"):
            return f"({self.file} line {self.lines[name]})"
        return f"({'environment' if source == 'env' else source})"

    def mark(self, name: str, line: str) -> str:
        """`line`, which starts with its key, naming the place."""
        start, _, rest = line.partition(":")
        return f"{start} {self[name]}:{rest}"


def _build(
    values: dict[str, Any], places: _Places, problems: list[str], broken: set[str]
) -> TrainConfig | None:
    """The configuration of `values`; what is wrong is added to `problems`.

    Values that are wrong in themselves are set aside first, so that rules between the others are still asked.
    """
    config: TrainConfig | None = None
    try:
        config = TrainConfig.model_validate(values, context=DEFER_CHECKS)
    except ValidationError as error:
        details = error.errors(include_url=False)
        bad = {str(detail["loc"][0]) for detail in details}
        problems += _value_lines(details, places)
        broken |= bad
        kept = {name: value for name, value in values.items() if name not in bad}
        config = TrainConfig.model_validate(kept, context=DEFER_CHECKS)
    problems += [
        places.mark(problem.keys[0], problem.text)
        for problem in contradictions(config)
        if not broken & set(problem.keys)
    ]
    return config


def _value_lines(details: Sequence[ErrorDetails], places: _Places) -> list[str]:
    """One line a wrong value: the value, the rule, the remedy."""
    known = keys()
    lines: dict[str, str] = {}
    for detail in details:
        name = str(detail["loc"][0])
        info = known[name]
        if info.target and _is_other_form(detail, info):
            continue
        inside = [str(part) for part in detail["loc"][1:] if isinstance(part, int) or info.kind == "dict"]
        if detail["type"] in _WRONG_COUNT:
            inside = []
        value = detail["input"]
        shown = _shown(value)
        part = f"{name}[{inside[0]}]" if inside else name
        rule, remedy = _rule(detail, info, shown)
        # The rule of a role names the part of the mapping that breaks it.
        told = f"{shown} {rule}" if info.kind != "roles" or detail["type"] != "target" else rule
        lines.setdefault(name, f"{part} {places[name]}: {told}; {remedy}")
    return list(lines.values())


def _is_other_form(detail: ErrorDetails, info: KeyInfo) -> bool:
    """A key that takes a word or a mapping complains about both; only the form that was written matters."""
    if isinstance(detail["input"], dict):
        return detail["type"] in ("literal_error", "string_type")
    return detail["type"] == "dict_type" and info.kind != "target"


def _shown(value: object) -> str:
    """A value on one line, cut when it is long."""
    if value is None:
        return "null"
    if isinstance(value, tuple | list):
        members = cast("Sequence[object]", value)
        value = f"[{', '.join(str(member) for member in members)}]"
    text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _rule(detail: ErrorDetails, info: KeyInfo, shown: str) -> tuple[str, str]:
    """What a value of this key must be, and what to write instead."""
    limits = detail.get("ctx", {})
    bounds = {
        "greater_than_equal": ("ge", "is too small", "or more"),
        "greater_than": ("gt", "is too small", "above that"),
        "less_than_equal": ("le", "is too large", "or less"),
        "less_than": ("lt", "is too large", "below that"),
    }
    kind = detail["type"]
    if kind in bounds:
        name, rule, remedy = bounds[kind]
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        limit = limits[name]
        limit = int(limit) if limit == int(limit) else limit
        return f"{rule}: it must be {words[name]} {limit}", f"use {limit} {remedy}" if name in (
            "ge",
            "le",
        ) else (f"use a value {words[name]} {limit}")
    if kind == "target":
        return limits["rule"], limits["remedy"]
    if info.kind == "roles":
        return "is not a mapping of roles", f"write for example {_example(info)}"
    if info.target and len(detail["loc"]) > 2:
        return "is not plain data", "give a target's arguments as text, numbers, lists and mappings"
    if kind == "string_pattern_mismatch":
        return "is not a sha256 digest", "write its 64 lower-case hexadecimal digits"
    if kind == "finite_number":
        return "is not a finite number", f"use a number such as {_example(info)}"
    if info.kind == "choice":
        advice = suggest(shown, info.choices)
        return f"is not one of {', '.join(info.choices)}", (
            advice[2:] if advice else f"use one of them, {_example(info)}"
        )
    if info.kind == "pair" and kind in _WRONG_COUNT:
        return "is not two numbers", f"write for example {_example(info)}"
    if len(detail["loc"]) > 1:
        word = "text" if info.kind == "list" else "a number"
        return f"is not {word}", f"write for example {_example(info)}"
    if kind == "too_short":
        return "is empty", f"use for example {_example(info)}"
    return f"is not {_article(info.type_name)}", f"write for example {_example(info)}"


def _article(words: str) -> str:
    plain = words.startswith(("true", "text", "two", "name"))
    return words if plain else f"a {words}"


def _example(info: KeyInfo) -> str:
    """A value that the key takes, as YAML."""
    samples = {
        "bool": "true",
        "int": "1",
        "float": "0.1",
        "str": "''",
        "list": "[a, b]",
        "pair": "[0.1, 0.9]",
        "target": "{_target_: my_module.MyPart}",
        "rewards": "[vbvr_rule, vbvr_vlm]",
        "roles": "{reward: {_target_: my_module.MyReward}}",
    }
    samples |= {"dict": "{score: 1.0}", "choice": ""}
    default = info.default
    if default is None or default == "" or default == []:
        return samples[info.kind] if info.kind != "choice" else "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple | list):
        members: list[Any] = list(default)  # pyright: ignore[reportUnknownArgumentType]
        return f"[{', '.join(str(member) for member in members)}]"
    if isinstance(default, dict):
        return samples["dict"]
    return str(default)
