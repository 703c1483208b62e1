"""From a specification to an algorithm: GRPO, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from wan_trainer.algorithms.base import Algorithm, AlgorithmParts
from wan_trainer.algorithms.grpo import Grpo
from wan_trainer.config.specs import AlgorithmName, Target
from wan_trainer.targets import checked_call, construct, require, require_methods

KEY = "trainer"


def grpo(parts: AlgorithmParts) -> Grpo:
    """GRPO takes all the parts there are."""
    return Grpo(**vars(parts))


ALGORITHMS: Mapping[str, Callable[[AlgorithmParts], Algorithm[Any]]] = {"dancegrpo": grpo}


def build_algorithm(choice: AlgorithmName | Target, parts: AlgorithmParts) -> Algorithm[Any]:
    """The algorithm that `trainer` names. Raises UserError when a target does not return an `Algorithm`."""
    if not isinstance(choice, Target):
        return ALGORITHMS[choice](parts)
    algorithm = construct(KEY, choice, parts)
    require_methods(KEY, choice, algorithm, ["prepare", "update"])
    version = getattr(algorithm, "policy_version", None)
    rule = f"starts at policy_version {version}, and the run is at {parts.policy_version} (in its parts)"
    require(KEY, choice, version == parts.policy_version, rule)
    return cast("Algorithm[Any]", algorithm)


def check_algorithm(choice: AlgorithmName | Target) -> None:
    """What can be said before there is a model: that a target is found and takes the parts and its arguments.

    Raises UserError.
    """
    if isinstance(choice, Target):
        checked_call(KEY, choice, "parts")
