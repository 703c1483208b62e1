"""What a ReFL step is: sampled videos, steps with a gradient, decodes, and which ranks have which role."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wan_trainer.config.specs import ReflSpec, RunSpec
from wan_trainer.topology import Topology, counted

NOT_COUNTED = (
    "not counted: the reward's networks with their activations for refl_sample_batch_size videos, and the "
    "VAE's decodes; the latter's backward pass, of one video, comes after the reward's (docs/refl.md)"
)


@dataclass(frozen=True)
class ReflWork:
    """The calls of one rank in one batch, at most.

    grad_steps: denoising steps with a gradient of a batch, at most; mean_grad_steps: on average, where they
    are drawn. sampling: transformer calls that draw. beside: calls without a gradient that differentiation
    adds, of the negative branch and of the reference. backward: forwards with their backward. decodes: of a
    chunk of videos, each once without and once with a gradient.
    """

    grad_steps: int
    mean_grad_steps: float
    sampling: int
    beside: int
    backward: int
    decodes: int


def count_refl(spec: RunSpec, refl: ReflSpec, topology: Topology) -> ReflWork:
    """The work of a batch on each training rank."""
    window = refl.last_grad_step - refl.first_grad_step + 1
    single = refl.algorithm in ("last_step", "x0_jump")
    most = 1 if single else window
    mean = (window + 1) / 2 if refl.algorithm == "random_k" else float(most)
    chunks = math.ceil(topology.rollouts_per_rank / refl.sample_batch_size)
    # With a gradient in both branches of guidance, one call of twice the rows makes both.
    separate = spec.sampler.cfg_scale > 1 and refl.cfg_grad == "conditional"
    steps = refl.last_grad_step + 1 if refl.algorithm == "x0_jump" else spec.sampler.num_steps
    return ReflWork(
        grad_steps=most,
        mean_grad_steps=mean,
        sampling=chunks * steps * (2 if separate else 1),
        beside=chunks * most * (int(separate) + int(refl.kl_coeff > 0)),
        backward=chunks * most,
        decodes=chunks,
    )


def describe_batch(spec: RunSpec, topology: Topology) -> str:
    """The prompts of a step."""
    expected = spec.batch.expected_global_prompts
    tail = "" if expected is None else f"; expected_global_prompts {expected}"
    return f"{counted(topology.prompts, 'prompt')} a step, one video of each{tail}"


def describe_share(refl: ReflSpec, topology: Topology) -> str:
    """The videos of a rank."""
    videos = topology.rollouts_per_rank
    chunks = math.ceil(videos / refl.sample_batch_size)
    size = min(videos, refl.sample_batch_size)
    return f"{counted(videos, 'video')} a step, in {counted(chunks, 'chunk')} of {size}"


def describe_sampling(spec: RunSpec, refl: ReflSpec, work: ReflWork) -> str:
    """How videos are drawn."""
    scale = spec.sampler.cfg_scale
    guidance = ""
    if scale > 1:
        how = "a second call a step" if refl.cfg_grad == "conditional" else "doubles a batch"
        guidance = f", guidance {scale:g}: {how}"
    least = "at most " if refl.algorithm == "x0_jump" else ""
    noise = ", the same noise for every video" if refl.fixed_noise else ""
    return (
        f"{counted(spec.sampler.num_steps, 'Euler step')}{guidance}{noise}; "
        f"{least}{counted(work.sampling, 'forward call')} a rank and step"
    )


def describe_gradient(spec: RunSpec, refl: ReflSpec, work: ReflWork) -> str:
    """Which steps have a gradient, and what that costs."""
    first, last = refl.first_grad_step, refl.last_grad_step
    window = f"step {last}" if first == last else f"steps {first}..{last}"
    drawn = {
        "last_step": "",
        "truncated": "",
        "drtune": ", inputs detached",
        "random_k": f", the last K of them, K drawn for each batch, {work.mean_grad_steps:g} on average",
        "x0_jump": ", one of them drawn for each batch",
    }[refl.algorithm]
    beside = f", {counted(work.beside, 'forward call')} without a gradient" if work.beside else ""
    return (
        f"{refl.algorithm}: {window} of 0..{spec.sampler.num_steps - 1}{drawn}; "
        f"{counted(work.backward, 'forward and backward call')}{beside}, "
        f"{counted(work.decodes, 'decode')} without and with a gradient, a rank and step"
    )


def describe_roles(refl: ReflSpec, topology: Topology) -> str:
    """Which ranks each role has."""
    roles, world = refl.roles, topology.world
    actor = _ranks(0, world)
    own = _ranks(world, roles.reward_ranks)
    served = f", each for {counted(world // roles.reward_ranks, 'rank')} of the actor" if own else ""
    parts = [f"actor on {actor}", f"reward {roles.reward} on {own or actor}{served}"]
    if roles.monitor is not None:
        parts.append(f"monitor {roles.monitor} on {own if own and roles.monitor_with_reward else actor}")
    if refl.kl_coeff > 0:
        parts.append(f"reference on {actor}")
    return "; ".join(parts)


def _ranks(first: int, count: int) -> str:
    if count == 0:
        return ""
    return f"rank {first}" if count == 1 else f"ranks {first}..{first + count - 1}"
