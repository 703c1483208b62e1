"""Trying the parts of the user's own that a configuration names, before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable

from wan_trainer.algorithms.build import check_algorithm
from wan_trainer.config.specs import RunSpec
from wan_trainer.models.wan.directory import read_directory
from wan_trainer.models.wan.grad_window import check_grad_window
from wan_trainer.objectives.surrogate import policy_loss
from wan_trainer.rewards.role_checks import check_roles
from wan_trainer.sampling.transitions import transition_rule
from wan_trainer.training.lr_schedule import learning_rate_schedule
from wan_trainer.types import UserError


def try_openings(spec: RunSpec) -> list[str]:
    """What is wrong with the transition, loss, schedule and algorithm of `spec`, one line each.

    All but the algorithm are built and tried on tiny inputs; the algorithm needs a model, so only its call is
    checked. The reward needs the dataset's tasks: `rewards.build.build_reward`; those of ReFL: `check_roles`.
    """
    attempts: list[Callable[[], object]] = [
        lambda: check_algorithm(spec.algorithm),
        lambda: transition_rule(spec.sampler.kind),
        lambda: policy_loss(spec.grpo.loss),
        lambda: learning_rate_schedule(spec.optimizer.lr_schedule, spec.optimizer.warmup_steps),
    ]
    lines: list[str] = []
    for attempt in attempts:
        try:
            attempt()
        except UserError as error:
            lines += error.problems
    return lines


def try_refl(spec: RunSpec) -> list[str]:
    """What is wrong with the rewards and the gradient window of a ReFL run, one line each.

    Raises UserError when the model directory cannot be read.
    """
    if spec.refl is None:
        return []
    directory = read_directory(spec.model.path, spec.model.family)
    return check_roles(spec.refl.roles) + check_grad_window(spec, spec.refl, directory)
