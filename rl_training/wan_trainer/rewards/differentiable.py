"""Rewards whose gradient reaches the pixels: found, built and checked."""

from __future__ import annotations

from typing import cast

from wan_trainer.config.specs import RolesSpec, Target
from wan_trainer.targets import checked_call, construct, require_methods, user_code
from wan_trainer.types import DifferentiableReward, RewardContext, UserError


def build_differentiable(key: str, target: Target, context: RewardContext) -> DifferentiableReward:
    """The reward that `target` returns for `context` and its configuration.

    key: the configuration key that names it. Raises UserError when it cannot be used.
    """
    reward = construct(key, target, context)
    require_methods(key, target, reward, ["score"])
    return cast("DifferentiableReward", reward)


def check_roles(roles: RolesSpec) -> list[str]:
    """What is wrong with the rewards of a run, one line each; see `check_differentiable`."""
    lines: list[str] = []
    for key, target in roles.targets.items():
        try:
            check_differentiable(key, target)
        except UserError as error:
            lines += error.problems
    return lines


def check_differentiable(key: str, target: Target) -> None:
    """What can be said without loading it: that it is found, takes its configuration and has its files.

    A target says the latter by a static method `check_files(**config)`, which raises UserError. Raises
    UserError.
    """
    factory = checked_call(key, target, None)
    check_files = getattr(factory, "check_files", None)
    if callable(check_files):
        with user_code(key, target, "check_files"):
            check_files(**target.arguments)
