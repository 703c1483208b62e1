"""Gradient norm and clipping over sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before, 0-d
    float32.

    Works on plain and on sharded (DTensor) parameters of any mixture of meshes, which tensor parallelism
    makes by splitting some parameters of a model and leaving the others whole on each of its ranks. A whole
    one counts once. max_norm 0 measures without clipping. Collective: all ranks of the run call it.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = _total_norm([parameter.grad for parameter in with_gradient if parameter.grad is not None])
    if max_norm > 0:
        # torch multiplies the gradients of one mesh at a time.
        groups: dict[DeviceMesh | None, list[torch.nn.Parameter]] = {}
        for parameter in with_gradient:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """One sum over all ranks of the run, so that every rank has the same bits in whatever order they add.

    Ranks whose norms differed in the last bit would scale differently what each of them holds whole.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    by_copies: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        shards = _shards(gradient)
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_copies.setdefault(world // shards, []).append(local)
    squares = [torch.nn.utils.get_total_norm(part).double() ** 2 / n for n, part in by_copies.items()]
    total = torch.stack(squares).sum()
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt().float()


def _shards(gradient: torch.Tensor) -> int:
    """Ranks that hold different parts of the gradient."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
