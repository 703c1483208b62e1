"""The parts of the user's own that a configuration names, and the rewards of a ReFL run."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from wan_trainer.config.specs import Family, OwnRewardSpec, RunSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.models.wan.directory import read_directory
from wan_trainer.models.wan.grad_window import check_grad_window
from wan_trainer.preflight.finding import Finding
from wan_trainer.rewards.build import build_part
from wan_trainer.rewards.role_checks import check_roles, check_samples
from wan_trainer.targets import named_targets, user_code
from wan_trainer.types import UserError


def check_openings(spec: RunSpec) -> list[Finding]:
    """Import, build and try every named part but the rewards."""
    roles = {} if spec.refl is None else spec.refl.roles.targets
    if not named_targets(spec).keys() - spec.reward.own.keys() - roles.keys():
        return []
    # Needs PyTorch, which takes seconds to import; a run of built-in parts is checked without it.
    from wan_trainer.training.openings import try_openings  # noqa: PLC0415

    return [Finding(line) for line in try_openings(spec)]


def check_refl(spec: RunSpec, family: Family | None, *, readable: bool) -> list[Finding]:
    """Rewards, their files and what they need of the data; of a `readable` model also the gradient window."""
    if spec.refl is None:
        return []
    lines = check_roles(spec.refl.roles)
    if not lines:
        # What is wrong with the data set itself is said where that is checked.
        with suppress(UserError):
            data = spec.data
            lines += check_samples(spec.refl.roles, load_dataset(data), data.num_frames, data.fps)
    if readable:
        lines += check_grad_window(spec, spec.refl, read_directory(spec.model.path, family))
    return [Finding(line) for line in lines]


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
