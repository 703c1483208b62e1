"""What can be said of the rewards of a ReFL run before anything is loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from wan_trainer.config.specs import RolesSpec, Target
from wan_trainer.targets import checked_call, user_code
from wan_trainer.types import Sample, UserError


def check_roles(roles: RolesSpec) -> list[str]:
    """One line for what is wrong with each reward: that it is found, takes its configuration, has its files.

    A target says the latter by a static method `check_files(**config)`, which raises UserError.
    """
    return [line for key, target in roles.targets.items() for line in _ask(key, target, "check_files")]


def check_samples(roles: RolesSpec, samples: Sequence[Sample], num_frames: int, fps: int) -> list[str]:
    """One line for what each reward misses in the data, before anything is drawn.

    A target says it by a static method `check_samples(samples, num_frames, fps, **config)`, which raises
    UserError.
    """
    data = (samples, num_frames, fps)
    return [
        line for key, target in roles.targets.items() for line in _ask(key, target, "check_samples", *data)
    ]


def _ask(key: str, target: Target, name: str, *leading: object) -> Sequence[str]:
    """The lines of the UserError that the target's optional static method `name` raises."""
    try:
        method = getattr(checked_call(key, target, None), name, None)
        if callable(method):
            with user_code(key, target, name):
                method(*leading, **target.arguments)
    except UserError as error:
        return error.problems
    return ()
