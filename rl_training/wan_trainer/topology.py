"""Ranks, prompts, waves and video shapes: the arithmetic that preflight, plan and the run share.

Torch-free. Nothing here looks at the machine: the same numbers come out on a laptop and on every node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from wan_trainer.types import UserError

if TYPE_CHECKING:
    # At run time the configuration imports this module for its shape tables, never the other way round.
    from wan_trainer.config.specs import BatchSpec, Family, ParallelSpec


@dataclass(frozen=True)
class FamilyShape:
    """Shape facts of one model family.

    patch: transformer patch over latent (frames, height, width). pixel_multiple: VAE stride x patch, what
    height and width must be multiples of. takes_image, needs_image: it can start from a first frame; it
    must. pins_first_frame: with one, latent frame 0 is the encoded image and is not sampled.
    """

    vae_temporal_stride: int
    vae_spatial_stride: int
    patch: tuple[int, int, int]
    latent_channels: int
    pixel_multiple: int
    experts: int
    takes_image: bool
    needs_image: bool
    pins_first_frame: bool

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, h, w) of a video's latent."""
        frames = (num_frames - 1) // self.vae_temporal_stride + 1
        stride = self.vae_spatial_stride
        return self.latent_channels, frames, height // stride, width // stride

    def tokens(self, num_frames: int, height: int, width: int) -> int:
        """Length of the transformer's sequence for one video."""
        _, frames, rows, columns = self.latent_shape(num_frames, height, width)
        return (frames // self.patch[0]) * (rows // self.patch[1]) * (columns // self.patch[2])


def _family(stride: int, channels: int, experts: int, takes: bool, needs: bool, pins: bool) -> FamilyShape:
    patch = (1, 2, 2)
    return FamilyShape(4, stride, patch, channels, stride * patch[1], experts, takes, needs, pins)


FAMILIES: Mapping[Family, FamilyShape] = {
    "ti2v-5b": _family(16, 48, experts=1, takes=True, needs=False, pins=True),
    "i2v-a14b": _family(8, 16, experts=2, takes=True, needs=True, pins=False),
    "t2v-1.3b": _family(8, 16, experts=1, takes=False, needs=False, pins=False),
    "t2v-a14b": _family(8, 16, experts=2, takes=False, needs=False, pins=False),
}


@dataclass(frozen=True)
class Topology:
    """How ranks share one step.

    dp = dp_replicate * dp_shard ranks hold different rollouts; the tp ranks of each share them. prompts: of
    one step over all ranks. wave: prompts whose rewards are gathered together. Rollouts are counted a step;
    rollouts_per_rank and rollouts_per_rank_wave count for each data-parallel rank. ranks_per_prompt is
    below 1 when one rank holds several prompts. world: ranks of the model; reward_ranks come on top.
    """

    nodes: int
    nproc: int
    world: int
    tp: int
    dp: int
    dp_replicate: int
    dp_shard: int
    prompts: int
    group_size: int
    wave: int
    waves: int
    rollouts_per_step: int
    rollouts_per_rank: int
    rollouts_per_rank_wave: int
    ranks_per_prompt: Fraction
    shared_prompts: bool
    reward_ranks: int = 0


def resolve_topology(
    batch: BatchSpec, parallel: ParallelSpec, group_size: int, nodes: int, nproc: int, reward_ranks: int = 0
) -> Topology:
    """The topology on `nodes` machines with `nproc` processes each; `group_size` rollouts of each prompt.

    reward_ranks: ranks of a reward's own, the last ones; the others are the world of the model.
    Raises UserError with every rule that the numbers break, each with the nearest values that work.
    """
    tp = parallel.tensor_parallel_size
    _check_ranks(nodes, nproc, tp)
    world = _actor_ranks(nodes * nproc, tp, reward_ranks)
    dp = world // tp
    shared = batch.shared_prompts
    prompts = batch.batch_size if shared else batch.batch_size * dp
    wave = (batch.wave or prompts) if shared else prompts
    group = group_size

    problems: list[str] = []
    expected = batch.expected_global_prompts
    if expected is not None and prompts != expected:
        problems.append(_wrong_prompts(batch, dp, prompts, expected))
    if prompts % wave:
        near = " or ".join(str(n) for n in _nearest(wave, divisors(prompts)))
        problems.append(
            f"grpo_shared_prompt_microbatch_size: {wave} does not divide batch_size {prompts}; use {near}"
        )
    elif (wave * group) % dp:
        problems.append(_unequal_shares(batch, wave, group, dp, prompts))
    if problems:
        raise UserError(*problems)

    shard, replicate = dp, 1
    if not parallel.fsdp:
        shard, replicate = 1, dp
    elif parallel.hsdp and nodes > 1:
        shard, replicate = nproc // tp, nodes
    return Topology(
        nodes=nodes,
        nproc=nproc,
        world=world,
        tp=tp,
        dp=dp,
        dp_replicate=replicate,
        dp_shard=shard,
        prompts=prompts,
        group_size=group,
        wave=wave,
        waves=prompts // wave,
        rollouts_per_step=prompts * group,
        rollouts_per_rank=prompts * group // dp,
        rollouts_per_rank_wave=wave * group // dp,
        ranks_per_prompt=Fraction(dp, wave),
        shared_prompts=shared,
        reward_ranks=reward_ranks,
    )


def _actor_ranks(ranks: int, tp: int, reward_ranks: int) -> int:
    """The ranks that train, once those of a reward's own are taken away."""
    actors = ranks - reward_ranks
    if reward_ranks == 0:
        return actors
    key = f"roles.reward.placement.ranks: {reward_ranks}"
    valid = [n for n in range(1, ranks) if (ranks - n) % n == 0 and (ranks - n) % tp == 0]
    remedy = "use " + " or ".join(str(n) for n in _nearest(reward_ranks, valid)) if valid else "start more"
    if actors < 1:
        raise UserError(f"{key} of {counted(ranks, 'rank')} leave none to the actor; {remedy}")
    if actors % reward_ranks:
        raise UserError(
            f"{key} cannot serve the {actors} other ranks alike, whose number they must divide; {remedy}"
        )
    if actors % tp:
        raise UserError(
            f"{key} leave {counted(actors, 'rank')} to the actor, which tensor_parallel_size {tp} does not "
            f"divide; {remedy}"
        )
    return actors


def _check_ranks(nodes: int, nproc: int, tp: int) -> None:
    problems = [
        f"{name}: {value} is not a number of {what}; use 1 or more"
        for name, value, what in (("nodes", nodes, "machines"), ("nproc", nproc, "processes"))
        if value < 1
    ]
    if not problems and nproc % tp:
        near = " or ".join(str(n) for n in _nearest(tp, divisors(nproc)))
        problems.append(
            f"tensor_parallel_size: {tp} does not divide the {nproc} processes of a node, whose ranks share "
            f"a model copy; use {near}, or --nproc {tp * math.ceil(nproc / tp)}"
        )
    if problems:
        raise UserError(*problems)


def _wrong_prompts(batch: BatchSpec, dp: int, prompts: int, expected: int) -> str:
    if batch.shared_prompts:
        return (
            f"expected_global_prompts: {expected} is not batch_size {prompts}, which counts all ranks; use "
            f"--batch_size {expected}"
        )
    fact = (
        f"expected_global_prompts: {expected} prompts a step were expected, but batch_size "
        f"{batch.batch_size} on each of {dp} data-parallel replicas gives {prompts}"
    )
    if expected % dp == 0:
        return f"{fact}; use --batch_size {expected // dp}"
    ranks = " or ".join(str(n) for n in _nearest(dp, divisors(expected)))
    return f"{fact}; use {ranks} replicas, which divide {expected}, or --expected_global_prompts {prompts}"


def _unequal_shares(batch: BatchSpec, wave: int, group: int, dp: int, prompts: int) -> str:
    """Names the key that the user set: the wave, or the whole batch where no wave was asked for.

    A group of one is ReFL's, which has no key for it.
    """
    remedies: list[str] = []
    if group > 1:
        groups = _nearest(group, [m for m in _multiples(dp // math.gcd(dp, wave), group) if m >= 2])
        remedies.append("--grpo_group_size " + " or ".join(str(n) for n in groups))
    name = "batch_size" if batch.wave is None else "grpo_shared_prompt_microbatch_size"
    if batch.wave is None:
        sizes = _nearest(wave, _multiples(dp // math.gcd(dp, group), wave))
    else:
        sizes = _nearest(wave, [n for n in divisors(prompts) if n * group % dp == 0])
    if sizes:
        remedies.append(f"--{name} " + " or ".join(str(n) for n in sizes))
    ranks = " or ".join(str(n) for n in _nearest(dp, divisors(wave * group)))
    remedies.append(f"{ranks} data-parallel ranks")
    return (
        f"{name}: {wave} prompts{f' x {group} rollouts' if group > 1 else ''} do not spread evenly "
        f"over {dp} data-parallel ranks; use {', or '.join(remedies)}"
    )


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def _multiples(unit: int, near: int) -> list[int]:
    """The multiples of `unit` around `near`."""
    low = near // unit * unit
    return [m for m in (low, low + unit, low + 2 * unit) if m > 0]


def _nearest(value: int, valid: list[int]) -> list[int]:
    """The largest valid number below `value` and the smallest above."""
    below = [n for n in valid if n <= value]
    above = [n for n in valid if n > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def assign(num_prompts: int, group_size: int, rank: int, world: int) -> list[tuple[int, int]]:
    """The (prompt, member) pairs of one data-parallel rank: an equal, contiguous share of the flat order.

    With one share per prompt or more each rank has its own prompts; with fewer, ranks share a prompt's group.
    Raises UserError when the pairs do not divide evenly: uneven ranks would deadlock in the next collective.
    """
    total = num_prompts * group_size
    if world < 1 or not 0 <= rank < world:
        raise UserError(f"rank: {rank} is outside a world of {world}; ranks count from 0 to world - 1")
    if total % world:
        raise UserError(
            f"{num_prompts} prompts x {group_size} rollouts do not spread evenly over {world} ranks; use "
            + " or ".join(str(n) for n in _nearest(world, divisors(total)))
            + " ranks"
        )
    share = total // world
    return [divmod(flat, group_size) for flat in range(rank * share, (rank + 1) * share)]


def check_video_shape(family: Family | None, num_frames: int, height: int, width: int) -> list[str]:
    """What is wrong with a video's shape, one line a value, each with the nearest valid ones.

    An unknown family is held to what every family needs: 4k+1 frames and multiples of 16 pixels.
    """
    shape = None if family is None else FAMILIES[family]
    stride = 4 if shape is None else shape.vae_temporal_stride
    first = stride + 1 if shape is not None and shape.pins_first_frame else 1
    problems: list[str] = []
    if num_frames < first or (num_frames - 1) % stride:
        low = (num_frames - 1) // stride * stride + 1
        near = " or ".join(str(n) for n in sorted({max(low, first), max(low + stride, first)}))
        why = f"{stride}k+1" if num_frames >= first else f"{stride}k+1 and at least {first}"
        problems.append(f"num_frames: {num_frames} is not {why}; use {near}")
    multiple = 16 if shape is None else shape.pixel_multiple
    for name, value in (("height", height), ("width", width)):
        if value % multiple == 0 and value > 0:
            continue
        # An unknown family is offered multiples of 32, which all families take.
        unit = 32 if shape is None else multiple
        low = value // unit * unit
        near = " or ".join(str(n) for n in (low, low + unit) if n > 0)
        reason = (
            "the least any Wan model takes"
            if shape is None
            else f"VAE stride {shape.vae_spatial_stride} x patch {shape.patch[1]} of {family}"
        )
        problems.append(f"{name}: {value} is not a multiple of {multiple} ({reason}); use {near}")
    return problems


def total_batches(
    num_epochs: float, max_steps: int | None, num_samples: int, batch_size: int, window: int
) -> int:
    """Batches of a run, a multiple of the accumulation `window`: floor(num_epochs * N / B), at most
    max_steps.

    Epochs are joined, so that no sample is dropped at an end. Counted exactly: 0.3 epochs of 10 samples are
    3, which a product of floats may miss. Raises UserError when not even one optimizer update comes out.
    """
    total = math.floor(Fraction(str(num_epochs)) * num_samples / batch_size)
    if max_steps is not None:
        total = min(total, max_steps)
    if total < window:
        raise UserError(
            f"num_epochs: {num_epochs:g} of {num_samples} samples in batches of {batch_size} prompts make "
            f"{counted(total, 'batch')}, fewer than one optimizer update needs ({window}); raise num_epochs "
            "or max_steps, or lower batch_size"
        )
    return total // window * window


def replay_step_count(num_steps: int, ratio: float) -> int:
    """Replayed denoising steps of a rollout; the last, noiseless step is never a candidate."""
    return max(1, int((num_steps - 1) * ratio))


def pending_rewards_needed(topology: Topology, depth: int) -> int:
    """Rollouts of one rank that can wait for a verdict at once when replay lags `depth` steps."""
    return topology.rollouts_per_rank * (depth + 1)


def check_pending(name: str, allowed: int, topology: Topology, depth: int) -> str | None:
    """What is wrong with a scoring queue of `allowed` rollouts of a rank, the value of the key `name`.

    A queue that cannot hold all of them would hold up the next rollout, or end the run in its first step.
    """
    needed = pending_rewards_needed(topology, depth)
    if allowed >= needed:
        return None
    rollouts = counted(topology.rollouts_per_rank, "rollout")
    delay = f" and {counted(depth, 'step')} of delay" if depth else ""
    return f"{name}: {allowed} cannot hold the {rollouts} of a rank{delay}; use --{name} {needed}"


def counted(number: int, noun: str) -> str:
    """`1 wave`, `2 waves`, `1,024 batches`."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def describe_ranks(nodes: int, nproc: int, tp: int, dp_replicate: int, dp_shard: int) -> str:
    """How the processes are arranged, for people."""
    layout = f"data parallel {dp_replicate * dp_shard}: {dp_replicate} x {dp_shard} (replicas x shards)"
    tensor = f"tensor parallel {tp}, " if tp > 1 else ""
    processes = "process" if nproc == 1 else "processes"
    return f"{counted(nodes, 'node')} x {nproc} {processes} = {nodes * nproc}; {tensor}{layout}"
