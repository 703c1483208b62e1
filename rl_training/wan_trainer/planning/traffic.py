"""Bytes that one rank sends in collectives, per transformer call and per step.

Ring algorithms: gathering or scattering B bytes over n ranks sends (n - 1) / n x B from each, reducing them
everywhere twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_trainer.config.specs import RunSpec
from wan_trainer.models.wan.architecture import ModelShape
from wan_trainer.models.wan.directory import EXPERTS, trained_experts
from wan_trainer.planning.memory import ELEMENT, branches_of_call, local_sizes
from wan_trainer.planning.workload import Workload
from wan_trainer.topology import FAMILIES, Topology


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by one rank: in each forward, each backward, each reduction of gradients; and in a step.

    forward_gather and backward_gather are within a shard group, replica_reduce across replicas (HSDP),
    tensor_forward and tensor_backward within a tensor-parallel group. reductions: reduce-scatters of
    gradients in a step; replicas are reduced in the last of each expert and update only.
    """

    forward_gather: int
    backward_gather: int
    reduce_scatter: int
    replica_reduce: int
    tensor_forward: int
    tensor_backward: int
    reductions: int
    replica_reductions: int
    step: int


def estimate_traffic(spec: RunSpec, topology: Topology, model: ModelShape, work: Workload) -> Traffic:
    """The traffic of one rank; a call reaches one expert."""
    sizes = local_sizes(spec, topology, model)
    element, reduce = ELEMENT[spec.model.param_dtype], ELEMENT[spec.model.reduce_dtype]
    shape, shards, replicas = model.transformer, topology.dp_shard, topology.dp_replicate
    sent = (shards - 1) / shards
    # Blocks are freed after use and gathered again; the rest of the expert stays from forward to backward.
    blocks = shape.num_layers * element * sizes.block
    forward = sent * (blocks + element * sizes.root)
    backward = sent * blocks
    gradient = shape.num_layers * sizes.trained_block + sizes.trained_root
    scatter = sent * reduce * gradient
    across = 2 * (replicas - 1) / replicas * reduce * gradient / shards
    tensor, _ = _tensor_bytes(spec, topology, model, spec.grpo.sample_batch_size)
    again, back = _tensor_bytes(spec, topology, model, spec.grpo.train_sample_batch_size)
    updates = spec.grpo.updates_per_rollout
    final = updates * len(trained_experts(spec.model, EXPERTS[: model.experts]))
    reductions = work.replay_calls if spec.grpo.sync_each_backward else final
    step = (
        work.rollout_calls * (sent * blocks + tensor)
        + work.replay_calls
        * (forward + backward + (2 if spec.model.gradient_checkpointing else 1) * again + back)
        + reductions * scatter
        + final * across
    )
    return Traffic(
        forward_gather=round(forward),
        backward_gather=round(backward),
        reduce_scatter=round(scatter),
        replica_reduce=round(across),
        tensor_forward=round(again),
        tensor_backward=round(back),
        reductions=reductions,
        replica_reductions=final,
        step=round(step),
    )


def _tensor_bytes(spec: RunSpec, topology: Topology, model: ModelShape, chunk: int) -> tuple[float, float]:
    """All-reduces of one forward and of one backward.

    Forward: the outputs of both attentions and of the feed-forward layer; backward: the gradients of their
    inputs, of which cross-attention has two. The sums of squares of the q/k norms, four bytes a token and
    norm, are left out.
    """
    if topology.tp == 1:
        return 0.0, 0.0
    data = spec.data
    tokens = FAMILIES[spec.model.family].tokens(data.num_frames, data.height, data.width)
    rows = min(chunk, topology.rollouts_per_rank_wave) * branches_of_call(spec)
    shape = model.transformer
    one = ELEMENT[spec.model.param_dtype] * rows * shape.dim
    ring = 2 * (topology.tp - 1) / topology.tp * shape.num_layers
    return ring * 3 * tokens * one, ring * (3 * tokens + model.text_length) * one
