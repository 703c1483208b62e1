"""Which rewards a run has: built-in ones by name, the user's own as targets; one, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, JsonValue

from wan_trainer.config.suggest import suggest
from wan_trainer.config.target import KEY, malformed, well_formed

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig

RULE, JUDGE = "vbvr_rule", "vbvr_vlm"
BUILT_IN = (RULE, JUDGE)


def _checked(value: JsonValue) -> JsonValue:
    for choice in listed(value):
        if isinstance(choice, Mapping):
            well_formed(dict(choice))
        elif not isinstance(choice, str) or choice not in BUILT_IN:
            shown = "null" if choice is None else str(choice)
            advice = suggest(shown, BUILT_IN)
            raise malformed(
                f"is not one of {', '.join(BUILT_IN)}",
                advice[2:] if advice else f"use one of them, a list of them, or a mapping with {KEY}",
            )
    # One reward is one value, however it was written: a resumed run compares values.
    return value[0] if isinstance(value, list) and len(value) == 1 else value


RewardChoice = Annotated[JsonValue, AfterValidator(_checked)]
"""A built-in reward's name, a target mapping, or a list of names and mappings."""


def listed(value: JsonValue) -> list[JsonValue]:
    """The choices of a value: those of a list, or the one that it is."""
    return list(value) if isinstance(value, list) else [value]


def label(choice: JsonValue) -> str:
    """What a reward is called in weights and components: its name, or the last word of its target."""
    if isinstance(choice, Mapping):
        return str(choice[KEY]).rpartition(".")[2]
    return str(choice)


def trained(config: TrainConfig) -> list[JsonValue]:
    """The rewards that are trained on."""
    return listed(config.grpo_reward_fn)


def monitored(config: TrainConfig) -> list[JsonValue]:
    """The rewards that are only logged."""
    return listed(config.reward_monitor)


def uses(config: TrainConfig, name: str) -> bool:
    """Whether a built-in reward is trained on or monitored."""
    return name in trained(config) or name in monitored(config)
