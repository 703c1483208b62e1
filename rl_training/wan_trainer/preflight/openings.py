"""The parts of the user's own that a configuration names."""

from __future__ import annotations

from collections.abc import Collection

from wan_trainer.config.specs import OwnRewardSpec, RunSpec
from wan_trainer.preflight.finding import Finding
from wan_trainer.rewards.build import build_part
from wan_trainer.targets import named_targets, user_code
from wan_trainer.types import UserError


def check_openings(spec: RunSpec) -> list[Finding]:
    """Import, build and try every named part but the reward."""
    if not named_targets(spec).keys() - spec.reward.own.keys():
        return []
    # Needs PyTorch, which takes seconds to import; a run of built-in parts is checked without it.
    from wan_trainer.training.openings import try_openings  # noqa: PLC0415

    return [Finding(line) for line in try_openings(spec)]


def check_own_reward(key: str, own: OwnRewardSpec, tasks: Collection[str]) -> list[Finding]:
    """Build the reward for the dataset's tasks, as every rank will, and close it."""
    if not tasks:
        return []
    try:
        reward = build_part(key, own, tasks)
        with user_code(key, own.target, "closing the reward"):
            reward.close()
    except UserError as error:
        return [Finding(line) for line in error.problems]
    return []
