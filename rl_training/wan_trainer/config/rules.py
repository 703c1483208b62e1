"""What a rule of the configuration says when it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig


@dataclass(frozen=True)
class Problem:
    """A broken rule: the keys it is about, the decisive one first, and the line for the user."""

    keys: tuple[str, ...]
    text: str


Rule = Callable[["TrainConfig"], Iterator[Problem]]


def refuse(key: str, text: str, *others: str) -> Problem:
    """The problem of `key`, in view of the keys `others`."""
    return Problem((key, *others), f"{key}: {text}")


def changed_keys(config: TrainConfig, *beginnings: str) -> list[str]:
    """Keys that begin so and whose value is not the default."""
    return [
        name
        for name, field in type(config).model_fields.items()
        if name.startswith(beginnings)
        and getattr(config, name) != field.get_default(call_default_factory=True)  # pyright: ignore[reportCallIssue]
    ]
