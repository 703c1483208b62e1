"""The whole public schema, composed of its sections."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Self, cast

from pydantic import ValidationInfo, model_validator

from wan_trainer.config.algorithm_sections import (
    GrpoSection,
    ReflSection,
    RolloutSection,
    RuleRewardSection,
    VlmRewardSection,
)
from wan_trainer.config.checks import contradictions
from wan_trainer.config.fields import KeyInfo, describe
from wan_trainer.config.sections import (
    DataSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    RunSection,
    Section,
)
from wan_trainer.types import UserError

DEFER_CHECKS = {"defer_checks": True}
"""Validation context of the loader, which asks for contradictions itself."""

SECTIONS: tuple[type[Section], ...] = (
    ModelSection,
    DataSection,
    RunSection,
    OptimizerSection,
    ParallelSection,
    RolloutSection,
    GrpoSection,
    RuleRewardSection,
    VlmRewardSection,
    ReflSection,
)


class TrainConfig(
    ReflSection,
    VlmRewardSection,
    RuleRewardSection,
    GrpoSection,
    RolloutSection,
    ParallelSection,
    OptimizerSection,
    RunSection,
    DataSection,
    ModelSection,
):
    """A run as the user states it: flat keys, each with a default. Contradictions are errors.

    Raises pydantic.ValidationError for a value of the wrong type or range and UserError for contradictions;
    `load_config` turns both into one list of lines.
    """

    @model_validator(mode="before")
    @classmethod
    def _one_switch_for_order(cls, values: Any) -> Any:
        """`shuffle` follows its recipe spelling, so that one key says what the order is."""
        if not isinstance(values, dict):
            return values
        given = cast("dict[str, Any]", values)
        if given.get("shuffle_raw_indices") is None:
            return given
        return {"shuffle": given["shuffle_raw_indices"], **given}

    @model_validator(mode="after")
    def _free_of_contradictions(self, info: ValidationInfo) -> Self:
        if info.context == DEFER_CHECKS:
            return self
        problems = contradictions(self)
        if problems:
            raise UserError(*(problem.text for problem in problems))
        return self


@cache
def keys() -> dict[str, KeyInfo]:
    """Every public key in the order of the documentation."""
    return {
        name: describe(name, field) for section in SECTIONS for name, field in section_fields(section).items()
    }


def section_fields(section: type[Section]) -> Mapping[str, Any]:
    """The declared fields of one section, in order."""
    return section.model_fields
