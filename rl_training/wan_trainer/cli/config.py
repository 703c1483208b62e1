"""`wan-trainer config`: every value of a configuration with its source."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import Any

import yaml

from wan_trainer.config.contract import public_values
from wan_trainer.config.document import default_text
from wan_trainer.config.load import LoadedConfig, load_with_sources
from wan_trainer.config.schema import SECTIONS, keys, section_fields
from wan_trainer.types import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; unknown ones are configuration overrides."""
    parser.add_argument("--config", metavar="FILE", help="the recipe (YAML)")
    parser.add_argument(
        "--format",
        choices=("table", "yaml", "json"),
        help="table (default on a terminal), yaml with the sources as comments (default in a pipe), or json",
    )
    parser.add_argument("--keys", action="store_true", help="list every key, its default and its meaning")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the configuration that `--config` and the overrides give."""
    if args.keys:
        print(key_list())
        return 0
    if args.config is None:
        raise UserError("wan-trainer config: --config is missing; name a recipe, or --keys to list the keys")
    loaded = load_with_sources(args.config, rest)
    chosen = args.format or ("table" if sys.stdout.isatty() else "yaml")
    print({"table": as_table, "yaml": as_yaml, "json": as_json}[chosen](loaded))
    return 0


def key_list() -> str:
    """Every key by section: its default, its type and its meaning."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += ["", section.title]
        for name in section_fields(section):
            info = keys()[name]
            default = default_text(info) if info.required else f"default {default_text(info)}"
            lines.append(f"  --{name}  {info.type_name}; {default}")
            lines += textwrap.wrap(info.meaning, 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines[1:])


def as_table(loaded: LoadedConfig) -> str:
    """Key, value and source in aligned columns, by section."""
    values = public_values(loaded.config)
    width = max(len(name) for name in values)
    shown = {name: _flow(value) for name, value in values.items()}
    value_width = min(60, max(len(text) for text in shown.values()))
    lines: list[str] = [f"{loaded.path}"]
    for section in SECTIONS:
        lines += ["", section.title]
        lines += [
            f"  {name:<{width}}  {shown[name]:<{value_width}}  {loaded.sources[name]}"
            for name in section_fields(section)
        ]
    return "\n".join(lines)


def as_yaml(loaded: LoadedConfig) -> str:
    """YAML that loads to the same configuration, secrets aside, the source of each value as a comment."""
    values = public_values(loaded.config)
    lines = [f"# {loaded.path}"]
    for section in SECTIONS:
        lines += ["", f"# {section.title}"]
        lines += [
            f"{name}: {_flow(values[name])}  # {loaded.sources[name]}" for name in section_fields(section)
        ]
    return "\n".join(lines)


def as_json(loaded: LoadedConfig) -> str:
    """One object: key to value and source."""
    values = public_values(loaded.config)
    table = {name: {"value": value, "source": loaded.sources[name]} for name, value in values.items()}
    return json.dumps({"path": str(loaded.path), "values": table}, indent=2)


def _flow(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").replace("${", "$${")
