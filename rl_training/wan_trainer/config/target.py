"""A part of the user's own in the configuration: a mapping whose `_target_` is an import path."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, JsonValue
from pydantic_core import PydanticCustomError

from wan_trainer.config.specs import Target

KEY = "_target_"
PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def well_formed(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The mapping itself. Only its form is looked at: showing a configuration imports nothing."""
    path = value.get(KEY)
    example = f"for example {KEY}: my_module.MyPart"
    if path is None:
        raise malformed(f"has no {KEY}", f"name what to call, {example}")
    if not isinstance(path, str) or PATH.fullmatch(path) is None:
        raise malformed(
            f"has {KEY} {' '.join(str(path).split())}, which is not an import path",
            f"write module.attribute, {example}",
        )
    for name in value:
        if not name.isidentifier():
            raise malformed(
                f"has {name!r} as the name of an argument", "write the names that the target takes"
            )
    return value


def malformed(rule: str, remedy: str) -> PydanticCustomError:
    """The error of a value of the wrong form."""
    return PydanticCustomError("target", "{rule}; {remedy}", {"rule": rule, "remedy": remedy})


TargetMapping = Annotated[dict[str, JsonValue], AfterValidator(well_formed)]
"""`{_target_: module.attribute, name: value, ...}`: the other keys are keyword arguments of the target."""


def chosen[T: str](value: T | Mapping[str, JsonValue]) -> T | Target:
    """A built-in choice as it is, a mapping as the specification of a target."""
    return value if isinstance(value, str) else as_target(value)


def as_target(mapping: Mapping[str, JsonValue]) -> Target:
    """The specification of a `TargetMapping`."""
    arguments = {name: value for name, value in mapping.items() if name != KEY}
    return Target(str(mapping[KEY]), json.dumps(arguments, sort_keys=True))
