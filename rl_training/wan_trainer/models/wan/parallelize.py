"""Distribution of the policy over the mesh: plain functions in a fixed order."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from wan_trainer.config.specs import ModelSpec
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.models.wan.architecture import check_heads, transformer_shape
from wan_trainer.models.wan.compiled import compile_blocks
from wan_trainer.models.wan.liger import use_liger
from wan_trainer.models.wan.lora import initialise
from wan_trainer.models.wan.policy import WanPolicy
from wan_trainer.models.wan.tensor_parallel import split_over_heads
from wan_trainer.models.wan.weights import expert_weights, fill
from wan_trainer.sampling.dtypes import DTYPES
from wan_trainer.types import UserError


def parallelize(policy: WanPolicy, spec: ModelSpec, mesh: Mesh, seed: int) -> WanPolicy:
    """Distribute the policy in place, then read weights still on meta.

    In this order: tensor parallelism, Liger's norms, activation checkpointing, compilation, FSDP2 or HSDP.
    FSDP is always applied, one process included, so that the precision rules never depend on the number of
    ranks; without sharding (`fsdp: false`) every shard group has one rank. Names of parameters and state-dict
    keys are unchanged. `seed` draws adapters still on meta, as in `build_policy`.

    Gradients are the MEAN over the dp ranks (FSDP divides by their number). A loss that is normalised by a
    global constant must therefore be multiplied by `mesh.dp_size` on each rank before `backward`.

    Raises UserError, the same on every rank, when the tp ranks cannot share the attention heads, or when
    Liger's kernels cannot run here.
    """
    for expert in policy.experts.values():
        problem = check_heads(transformer_shape(expert.config), mesh.tp_size)
        if problem is not None:
            raise UserError(problem)
    # One object for all experts: compiled blocks compare meshes by identity.
    tensor_mesh = mesh.device_mesh["tp"]
    for name, expert in policy.experts.items():
        on_meta = any(parameter.is_meta for parameter in expert.parameters())
        if mesh.tp_size > 1:
            split_over_heads(expert, tensor_mesh)
        if spec.use_liger_kernel:
            use_liger(expert, mesh.device)
        if spec.gradient_checkpointing:
            checkpoint_activations(expert)
        if spec.compile_backend is not None:
            compile_blocks(expert, spec.compile_backend, spec.compile_mode)
        shard(expert, dp_mesh(mesh), DTYPES[spec.param_dtype], DTYPES[spec.reduce_dtype])
        if on_meta:
            fill(expert, expert_weights(spec, name), mesh.device)
            initialise(name, expert, seed)
    return policy


def checkpoint_activations(expert: WanTransformer3DModel) -> None:
    """Recompute each block in the backward pass.

    Diffusers' own switch wraps the call, not the module, so parameter names stay. Non-reentrant, or adapters
    whose block input needs no gradient would get none. The model draws no random numbers, so no RNG state is
    kept.
    """
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    expert.enable_gradient_checkpointing(recompute)


def shard(
    expert: WanTransformer3DModel, mesh: DeviceMesh, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    """Apply `fully_shard` to each block, the time embedder, and the expert as its own root.

    Blocks are freed after their forward (memory: one gathered block at a time) and gathered again for
    backward; the root's few parameters stay gathered, for its backward comes first. Inputs are not cast: the
    timestep must reach the sinusoid in float32. The time embedder computes in float32, as in Diffusers
    (`_keep_in_fp32_modules`): in bfloat16 its input would lose the sinusoid's fine differences between
    neighbouring sigmas.
    """
    # Wan returns views, and FSDP warns on each rank that writing into them would fail: nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mixed = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    full = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in expert.blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
    fully_shard(
        expert.condition_embedder.time_embedder, mesh=mesh, mp_policy=full, reshard_after_forward=True
    )
    fully_shard(expert, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)


def dp_mesh(mesh: Mesh) -> DeviceMesh:
    """The axes that parameters are sharded over (dp_shard) and, with replicas, copied over (dp_replicate)."""
    if mesh.device_mesh["dp_replicate"].size() == 1:
        return mesh.device_mesh["dp_shard"]
    return mesh.device_mesh["dp_replicate", "dp_shard"]
