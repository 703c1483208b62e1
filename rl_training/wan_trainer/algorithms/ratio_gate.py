"""The gate that stops a run whose replay does not reproduce its rollout."""

from __future__ import annotations

from collections.abc import Sequence

from wan_trainer.algorithms.protocols import Policy
from wan_trainer.algorithms.statistics import ReplaySummary
from wan_trainer.config.specs import GrpoSpec, SamplerSpec, Target
from wan_trainer.types import RunFailure, StoredStep


class RatioGateError(RunFailure):
    """Unchanged weights replayed with a ratio other than 1."""


def check_ratio_gate(
    summary: ReplaySummary,
    steps: Sequence[StoredStep],
    policy: Policy,
    grpo: GrpoSpec,
    sampler: SamplerSpec,
) -> None:
    """Raise RatioGateError when the first pass over an age-0 rollout has |ratio - 1| above the tolerance.

    Called before the optimizer changes the weights, with totals of all ranks: every rank takes the same
    branch. Not finite counts as beyond. Steps of a frozen expert are not replayed and count as 0. A pass of
    nothing else checks nothing, but changes no weight either: the rollout after it is of age 0 again.
    """
    tolerance = grpo.ratio_gate_tolerance
    if max(summary.deviation) <= tolerance:
        return
    lines = [
        "replay of an unchanged policy differs from its rollout: max |ratio - 1| is "
        f"{max(summary.deviation):.3g}, ratio_gate_tolerance is {tolerance:.3g}",
        "step    sigma  sigma_next  expert         mean ratio - 1  max |ratio - 1|",
    ]
    for position, step in enumerate(steps):
        count = summary.samples[position]
        mean = f"{summary.ratio[position] / count - 1:+.3e}" if count else "no sample"
        if not policy.trains_at(step.sigma):
            mean = "frozen"
        lines.append(
            f"{step.index:4d} {step.sigma:8.5f} {step.sigma_next:11.5f}  {policy.expert_for(step.sigma):13s} "
            f"{mean:>15s} {summary.deviation[position]:16.3e}"
        )
    shapes = (grpo.sample_batch_size, grpo.train_sample_batch_size)
    lines.append("suspects, most likely first:")
    if isinstance(sampler.kind, Target):
        lines.append(
            f"  {sampler.kind.path}: a transition must be a function of its arguments alone (run once with a "
            "built-in grpo_sde_formula)"
        )
    lines += [
        "  compile: graphs specialised to shapes that differ (run once with --no-torch_compile)",
        "  attention kernel: forward and backward builds of one kernel differ (--attention_backend native)",
        f"  chunk shape: rollout draws {shapes[0]}, replay {shapes[1]} samples a call (make "
        "grpo_train_sample_batch_size equal to grpo_sample_batch_size)",
        f"  store dtype: log-probabilities must be of the latent rounded to {sampler.trajectory_dtype} "
        "(run once with --trajectory_dtype float32)",
        "a drift you accept: raise ratio_gate_tolerance, staying well below grpo_clip_range "
        f"{grpo.clip_range:g}",
    ]
    raise RatioGateError("\n".join(lines))
