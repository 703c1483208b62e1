"""`wan-trainer check-recipes`: whether recipes load and each part that they name by `_target_` is there."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from wan_trainer.config.load import load_with_sources
from wan_trainer.config.paths import caller_directory, find_config, trainer_root
from wan_trainer.config.specs import Target
from wan_trainer.config.target import KEY, PATH
from wan_trainer.targets import locate, make_importable
from wan_trainer.topology import counted
from wan_trainer.types import UserError

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class NamedTarget:
    """A `_target_` of a recipe and where it stands."""

    file: Path
    line: int
    path: str


class _AnySet(Mapping[str, str]):
    """An environment in which every variable that a recipe needs is set: paths are not what is checked."""

    def __getitem__(self, name: str) -> str:
        return os.environ.get(name) or f"the value of {name}"

    def get(self, key: str, default: str | None = None) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As it is: a variable with a default in the recipe has that."""
        return os.environ.get(key, default)

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(os.environ)

    def __len__(self) -> int:
        return len(os.environ)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="recipes, or directories of recipes (default configs)"
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """0 when all recipes load and all their targets can be imported; otherwise one line a problem."""
    problems: list[str] = []
    for recipe in recipes(args.paths):
        found = targets(recipe)
        lines = unresolvable(found) + _unloadable(recipe)
        problems += lines
        if not lines:
            print(f"{recipe}: loads, {counted(len(found), 'target')}", flush=True)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return 0


def recipes(names: list[str]) -> list[Path]:
    """The recipes that the arguments stand for. Raises UserError for a name that stands for none."""
    files: list[Path] = []
    for name in names or [str(trainer_root() / "configs")]:
        place = caller_directory() / Path(name).expanduser()
        if not place.is_dir():
            files.append(find_config(name))
            continue
        inside = sorted(path for path in place.rglob("*") if path.suffix in _SUFFIXES)
        if not inside:
            raise UserError(
                f"{place}: holds no {' or '.join(_SUFFIXES)} file; name recipes or their directory"
            )
        files += inside
    return files


def targets(recipe: Path) -> list[NamedTarget]:
    """Every `_target_` of a recipe at any depth; none of what is not YAML."""
    try:
        root = yaml.compose(recipe.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []  # loading the recipe says so
    found: list[NamedTarget] = []
    seen: set[int] = set()
    pending = [] if root is None else [root]
    while pending:
        node = pending.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        if not isinstance(node, yaml.MappingNode):
            continue
        for key, value in node.value:
            pending += [key, value]
            if isinstance(key, yaml.ScalarNode) and key.value == KEY:
                found.append(NamedTarget(recipe, value.start_mark.line + 1, str(value.value)))
    return sorted(found, key=lambda target: target.line)


def unresolvable(found: list[NamedTarget]) -> list[str]:
    """One line for each target whose module cannot be imported or has no such callable."""
    lines: list[str] = []
    for target in found:
        where = f"{target.file}:{target.line}"
        make_importable(target.file.parent)
        if PATH.fullmatch(target.path) is None:
            lines.append(
                f"{where}: {KEY}: {target.path} is not an import path; write module.attribute, for example "
                f"{KEY}: my_module.MyPart"
            )
            continue
        try:
            locate(f"{where}: {KEY}", Target(target.path))
        except UserError as error:
            lines += error.problems
    return lines


def _unloadable(recipe: Path) -> list[str]:
    try:
        load_with_sources(recipe, environment=_AnySet())
    except UserError as error:
        return list(error.problems)
    return []
