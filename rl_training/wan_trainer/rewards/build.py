"""From a specification to a reward."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, closing
from typing import cast

from wan_trainer.config.specs import OwnRewardSpec, PartSpec, RewardSpec, RuleRewardSpec
from wan_trainer.rewards.composition import ComposedReward, NamedReward
from wan_trainer.rewards.function import FunctionReward
from wan_trainer.rewards.function_worker import is_scoring_function, scoring_function
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.targets import construct, require_methods
from wan_trainer.types import Reward


def build_reward(spec: RewardSpec, tasks: Collection[str]) -> Reward:
    """The reward a run's specification asks for.

    `tasks` are the task names of the whole dataset, so that a task nobody can score is known before step 0.
    One reward is itself. Of several, components are called `name.component`, those of a monitored one
    `monitor.name.component`; a single trained one keeps its components' names beside monitored ones. Raises
    UserError when a reward cannot be used.
    """
    with ExitStack() as stack:
        parts: list[NamedReward] = []
        for key, part in spec.keyed_parts:
            reward = stack.enter_context(closing(build_part(key, part.spec, tasks)))
            monitored = part in spec.monitored
            prefix = "" if not monitored and len(spec.trained) == 1 else f"{part.name}."
            parts.append(
                NamedReward(
                    part.name,
                    reward,
                    None if monitored else part.weight,
                    f"monitor.{prefix}" if monitored else prefix,
                )
            )
        stack.pop_all()
    return parts[0].reward if len(parts) == 1 else ComposedReward(parts)


def build_part(key: str, spec: PartSpec, tasks: Collection[str]) -> Reward:
    """One reward, by the type of its specification. key: the configuration key that names it."""
    if isinstance(spec, OwnRewardSpec):
        if is_scoring_function(key, spec.target):
            scoring_function(key, spec.target)  # what is wrong with it is said here, not by a process
            return FunctionReward(key, spec)
        reward = construct(key, spec.target, tuple(tasks))
        require_methods(key, spec.target, reward, ["submit", "close"])
        return cast("Reward", reward)
    if isinstance(spec, RuleRewardSpec):
        return RuleReward(spec, tasks)
    # The client of the judge takes a second to import; runs without a judge do not wait for it.
    from wan_trainer.rewards.judge import VlmReward  # noqa: PLC0415

    return VlmReward(spec, tasks)
