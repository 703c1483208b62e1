"""From a specification to a reward."""

from __future__ import annotations

from collections.abc import Collection

from wan_trainer.config.specs import RuleRewardSpec, VlmRewardSpec
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.types import Reward


def build_reward(spec: RuleRewardSpec | VlmRewardSpec, tasks: Collection[str]) -> Reward:
    """The reward a run's specification asks for.

    `tasks` are the task names of the whole dataset, so that a task nobody can score is known before step 0.
    The specification's type chooses the reward: a further kind of reward is a further specification and a
    case here. Raises UserError when the reward cannot be used.
    """
    assert isinstance(spec, RuleRewardSpec), "`config.unbuilt` refuses the judge"
    return RuleReward(spec, tasks)
