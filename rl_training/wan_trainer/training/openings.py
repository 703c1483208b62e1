"""Trying the parts of the user's own that a configuration names, before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from wan_trainer.algorithms.build import check_algorithm
from wan_trainer.config.specs import RunSpec
from wan_trainer.objectives.surrogate import policy_loss
from wan_trainer.rewards.differentiable import check_differentiable
from wan_trainer.sampling.transitions import transition_rule
from wan_trainer.training.lr_schedule import learning_rate_schedule
from wan_trainer.types import UserError


def try_openings(spec: RunSpec) -> list[str]:
    """What is wrong with the transition, loss, schedule and algorithm of `spec`, one line each.

    All but the algorithm are built and tried on tiny inputs; the algorithm needs a model, so only its call is
    checked. The reward needs the dataset's tasks: `rewards.build.build_reward`.
    """
    attempts: list[Callable[[], object]] = [
        lambda: check_algorithm(spec.algorithm),
        lambda: transition_rule(spec.sampler.kind),
        lambda: policy_loss(spec.grpo.loss),
        lambda: learning_rate_schedule(spec.optimizer.lr_schedule, spec.optimizer.warmup_steps),
    ]
    roles = {} if spec.refl is None else spec.refl.roles.targets
    attempts += [partial(check_differentiable, key, target) for key, target in roles.items()]
    lines: list[str] = []
    for attempt in attempts:
        try:
            attempt()
        except UserError as error:
            lines += error.problems
    return lines
