"""Field declarations of the public schema: a default, a meaning, and what the loader must know of a key."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import Field, JsonValue
from pydantic.fields import FieldInfo

from wan_trainer.config.reward_choice import BUILT_IN
from wan_trainer.config.roles import RolesMapping
from wan_trainer.config.target import TargetMapping

Group = Literal["model", "data", "reward", "sampler", "optimization"]
"""Contract groups: keys that a resumed run must not change silently. Output and topology keys are in none."""


def key(
    default: Any,
    meaning: str,
    *,
    group: Group | None = None,
    path: bool = False,
    secret: bool = False,
    required: bool = False,
    **constraints: Any,
) -> Any:
    """A field of a section. `constraints` are pydantic's (ge, gt, le, lt, pattern, min_length).

    path: a relative value is relative to the trainer's directory. secret: masked wherever it is shown.
    required: there is no usable default, so that leaving the key out is an error.
    """
    if isinstance(default, list | dict):
        constraints["default_factory"] = cast("list[Any]", default).copy
    else:
        constraints["default"] = default
    extra: dict[str, Any] = {"group": group, "path": path, "secret": secret, "required": required}
    declared: Any = Field(description=meaning, json_schema_extra=extra, **constraints)
    return declared


@dataclass(frozen=True)
class KeyInfo:
    """What the loader and the documentation know of one key.

    kind: the shape of a value. choices: the allowed words of a "choice" key. target: a mapping with
    `_target_` is accepted too.
    """

    name: str
    kind: Literal[
        "bool", "int", "float", "str", "choice", "list", "pair", "dict", "target", "rewards", "roles"
    ]
    nullable: bool
    choices: tuple[str, ...]
    default: Any
    meaning: str
    group: Group | None
    path: bool
    secret: bool
    required: bool
    target: bool

    @property
    def type_name(self) -> str:
        """The type as the documentation words it."""
        words = {"str": "path" if self.path else "text", "list": "list of text", "pair": "two numbers"}
        words |= {"dict": "name: number", "int": "whole number", "float": "number", "bool": "true or false"}
        words["target"] = "mapping with `_target_`"
        words["rewards"] = f"{', '.join(BUILT_IN)}, {words['target']}, or list of these"
        words["roles"] = "mapping of roles"
        shown = ", ".join(self.choices) if self.kind == "choice" else words[self.kind]
        if self.target and self.kind not in ("target", "rewards"):
            shown += f" or {words['target']}"
        return f"{shown} or null" if self.nullable else shown


def describe(name: str, field: FieldInfo) -> KeyInfo:
    """The loader's view of a declared field."""
    annotation: Any = field.annotation
    members = get_args(annotation)
    nullable = NoneType in members
    rewards = annotation == JsonValue
    target = rewards or TargetMapping in members
    inner: Any = annotation
    if nullable or (target and not rewards):
        own = [member for member in members if member is not NoneType and member != TargetMapping]
        inner = own[0] if own else TargetMapping
    if inner not in (TargetMapping, RolesMapping) and get_origin(inner) is Annotated:
        inner = get_args(inner)[0]
    origin = get_origin(inner)
    choices: tuple[str, ...] = ()
    if rewards:
        kind = "rewards"
    elif RolesMapping in members:
        kind = "roles"
    elif inner == TargetMapping:
        kind = "target"
    elif origin is Literal:
        kind = "choice"
        choices = tuple(str(choice) for choice in get_args(inner))
    else:
        kinds = {
            bool: "bool",
            int: "int",
            float: "float",
            str: "str",
            list: "list",
            tuple: "pair",
            dict: "dict",
        }
        kind = kinds[origin or inner]
    extra = field.json_schema_extra
    assert isinstance(extra, dict), f"{name} is not declared with key()"
    facts = cast("dict[str, Any]", extra)
    return KeyInfo(
        name=name,
        kind=kind,  # pyright: ignore[reportArgumentType]
        nullable=nullable,
        choices=choices,
        default=field.get_default(call_default_factory=True),  # pyright: ignore[reportCallIssue]
        meaning=field.description or "",
        group=facts["group"],
        path=bool(facts["path"]),
        secret=bool(facts["secret"]),
        required=bool(facts["required"]),
        target=target,
    )
