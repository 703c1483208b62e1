"""Values as text: `--key value` overrides and the YAML file, turned into the plain values of the schema."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from wan_trainer.config.fields import KeyInfo
from wan_trainer.config.roles import ACTOR
from wan_trainer.config.suggest import suggest

_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


class _Loader(yaml.SafeLoader):
    """Safe YAML with the YAML 1.2 scalars: `1e-5` is a number, `yes`, `010` and `1:30` are not surprises."""


_untyped: Any = _Loader  # PyYAML has no type annotations
_untyped.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", _NUMBER.pattern + r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
):
    _untyped.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # PyYAML reads a leading zero as octal.
    return int(str(loader.construct_scalar(node)), 10)


_untyped.add_constructor("tag:yaml.org,2002:int", _decimal)


@dataclass
class Values:
    """Values of one source by key, with where each stands and what was wrong with the source.

    lines: line of the key in its file. from_env: keys whose value was taken from an environment variable.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    lines: dict[str, int] = field(default_factory=dict[str, int])
    from_env: set[str] = field(default_factory=set[str])
    problems: list[str] = field(default_factory=list[str])


class _Interpolation:
    """Replaces `${NAME}` and `${NAME:-default}` in text and remembers what happened."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.used_env = False
        self.unset: list[str] = []

    def __call__(self, text: str) -> str:
        return _VARIABLE.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        if match.group(0) == "$${":
            return "${"
        name, default = match.group(1), match.group(2)
        # As in a shell, `:-` also covers a variable that is set but empty.
        if self._environment.get(name) or (name in self._environment and default is None):
            self.used_env = True
            return self._environment[name]
        if default is None:
            self.unset.append(name)
            return ""
        return default


def read_yaml(
    path: Path, known: Mapping[str, KeyInfo], environment: Mapping[str, str] = os.environ
) -> Values:
    """The top-level values of a YAML file. What is wrong with it is in `problems`, one line each."""
    found = Values()
    try:
        text = path.read_text(encoding="utf-8")
        loader: Any = _Loader(text)
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        found.problems.append(f"{path}: cannot be read as UTF-8 text ({error}); name a YAML file")
        return found
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or "not valid YAML"
        found.problems.append(f"{path}{line}: {reason}; write one `key: value` on each line")
        return found
    if root is None:
        return found
    if not isinstance(root, yaml.MappingNode):
        found.problems.append(f"{path}: is not a list of `key: value` lines; write one on each line")
        return found
    for key_node, value_node in _entries(root):
        name = str(key_node.value)
        line = key_node.start_mark.line + 1
        where = f"{name} ({path} line {line})"
        if name in found.lines:
            found.problems.append(f"{where}: is also set on line {found.lines[name]}; remove one of them")
            continue
        found.lines[name] = line
        if name not in known:
            found.problems.append(f"{where}: is not a configuration key{_advice(name, known, '')}")
            continue
        _read_value(loader, value_node, known[name], where, environment, found)
    return found


def _entries(root: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """The `key: value` pairs of a file; those of `roles.actor` count as its own."""
    entries: list[tuple[Any, Any]] = []
    for key_node, value_node in root.value:
        entries.append((key_node, value_node))
        if key_node.value != "roles" or not isinstance(value_node, yaml.MappingNode):
            continue
        roles: list[tuple[Any, Any]] = value_node.value
        actors = [part for role, part in roles if role.value == ACTOR and isinstance(part, yaml.MappingNode)]
        if len(actors) > 1:
            continue  # named twice, which is refused as anywhere
        value_node.value = [(role, part) for role, part in roles if part not in actors]
        for actor in actors:
            entries += actor.value
    return entries


def _read_value(
    loader: Any, node: yaml.Node, info: KeyInfo, where: str, environment: Mapping[str, str], found: Values
) -> None:
    """Add the value of one key to `found`, or what is wrong with it."""
    interpolation = _Interpolation(environment)
    repeated: list[str] = []
    _substitute(loader, node, interpolation, repeated)
    for variable in interpolation.unset:
        found.problems.append(
            f"{where}: environment variable {variable} is not set; export it or write "
            f"${{{variable}:-default}}"
        )
    found.problems += [f"{where}: names {inner} twice; remove one of them" for inner in repeated]
    if interpolation.unset or repeated:
        return
    try:
        value: Any = loader.construct_object(node, deep=True)
    except yaml.YAMLError:
        found.problems.append(f"{where}: is not a plain value; write text, a number, a list or null")
        return
    if interpolation.used_env:
        found.from_env.add(info.name)
        if isinstance(value, str):
            value = parse_tokens(info, [value])
    found.values[info.name] = value


def _substitute(loader: Any, node: yaml.Node, interpolation: _Interpolation, repeated: list[str]) -> None:
    """Interpolate the scalars under `node` in place, keeping YAML's typing, and find repeated keys."""
    if isinstance(node, yaml.ScalarNode):
        if "${" in node.value:
            node.value = interpolation(node.value)
            if node.style is None:
                node.tag = loader.resolve(yaml.ScalarNode, node.value, (True, False))
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _substitute(loader, child, interpolation, repeated)
    elif isinstance(node, yaml.MappingNode):
        names = [str(key.value) for key, _ in node.value]
        repeated += sorted({name for name in names if names.count(name) > 1})
        for _, child in node.value:
            _substitute(loader, child, interpolation, repeated)


def _advice(name: str, known: Collection[str], prefix: str) -> str:
    return suggest(name, known, prefix) or "; wan-trainer config --keys lists them"


def parse_flags(arguments: Sequence[str], known: Mapping[str, KeyInfo]) -> Values:
    """Overrides of the command line: `--x v`, `--x=v`, `--flag`, `--no-flag`, `--x 0.1 0.9`; last wins."""
    found = Values()
    position = 0
    rest = [argument for argument in arguments if argument != "--"]
    while position < len(rest):
        argument = rest[position]
        position += 1
        if not argument.startswith("--"):
            found.problems.append(f"{argument}: stands alone; write overrides as --key value")
            continue
        name, equals, inline = argument[2:].partition("=")
        tokens = [inline] if equals else []
        while not equals and position < len(rest) and not rest[position].startswith("--"):
            tokens.append(rest[position])
            position += 1
        problem = _read_flag(found, name.replace("-", "_"), name, tokens, known)
        if problem:
            found.problems.append(problem)
    return found


def _read_flag(
    found: Values, name: str, written: str, tokens: list[str], known: Mapping[str, KeyInfo]
) -> str | None:
    """Record one flag; a line for the user when it is wrong."""
    info = known.get(name)
    if info is None and written.startswith("no-"):
        info = known.get(name.removeprefix("no_"))
        if info is not None and info.kind != "bool":
            return f"--{written}: {info.name} is not a switch; write --{info.name} VALUE"
        if info is not None and tokens:
            return f"--{written}: takes no value, but got {tokens[0]}; write --{written} alone"
        if info is not None:
            found.values[info.name] = False
            return None
    if info is None:
        switch = name.startswith("no_") and name[3:] in known and known[name[3:]].kind == "bool"
        advice = f"; did you mean --no-{name[3:]}?" if switch else _advice(name, known, "--")
        return f"--{written}: is not a flag{advice}"
    if not tokens:
        if info.kind == "bool":
            found.values[info.name] = True
            return None
        return f"--{info.name}: has no value; write --{info.name} VALUE ({info.type_name})"
    if len(tokens) > 1 and info.kind not in ("list", "pair", "rewards"):
        return f"--{info.name}: takes one value, but got {' '.join(tokens)}; quote it or remove the rest"
    found.values[info.name] = parse_tokens(info, tokens)
    return None


def parse_tokens(info: KeyInfo, tokens: Sequence[str]) -> Any:
    """The value of a key from its words. What does not fit its type stays text, for validation to refuse."""
    text = tokens[0]
    if len(tokens) == 1 and info.nullable and text.strip().lower() in ("null", "none", "~"):
        return None
    if info.kind == "rewards":
        written = [_flow(token) if token.lstrip()[:1] in ("[", "{") else token for token in tokens]
        return written[0] if len(written) == 1 else written
    if (info.target or info.kind == "roles") and text.lstrip().startswith("{"):
        return _flow(text)
    if info.kind in ("list", "pair", "dict"):
        if len(tokens) == 1 and text.lstrip()[:1] in ("[", "{"):
            return _flow(text)
        if info.kind == "dict":
            return text
        words: list[Any] = [token for token in tokens if token]
        return words if info.kind == "list" else [_number(word) for word in words]
    if info.kind == "bool":
        return {"true": True, "false": False}.get(text.strip().lower(), text)
    if info.kind == "int":
        return int(text) if re.fullmatch(r"\s*[-+]?[0-9]+\s*", text) else text
    return _number(text) if info.kind == "float" else text


def _number(text: str) -> float | str:
    return float(text) if _NUMBER.fullmatch(text.strip()) else text


def _flow(text: str) -> Any:
    """A JSON or YAML list or mapping; the text itself when it is neither."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text
