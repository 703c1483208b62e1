"""From a specification to a reward."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from wan_trainer.config.specs import RuleRewardSpec, Target, VlmRewardSpec
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.targets import construct, require_methods
from wan_trainer.types import Reward


def build_reward(spec: RuleRewardSpec | VlmRewardSpec | Target, tasks: Collection[str]) -> Reward:
    """The reward a run's specification asks for.

    `tasks` are the task names of the whole dataset, so that a task nobody can score is known before step 0.
    The specification's type chooses the reward: a further kind of reward is a further specification and a
    case here; a target is the user's own, called with the tasks. Raises UserError when the reward cannot be
    used.
    """
    if isinstance(spec, Target):
        reward = construct("grpo_reward_fn", spec, tuple(tasks))
        require_methods("grpo_reward_fn", spec, reward, ["submit", "close"])
        return cast("Reward", reward)
    assert isinstance(spec, RuleRewardSpec), "`config.unbuilt` refuses the judge"
    return RuleReward(spec, tasks)
