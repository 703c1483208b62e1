"""Gradient norm and clipping over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before, 0-d
    float32.

    Works on plain and on sharded (DTensor) parameters. Those of one mesh are taken together and the norms of
    the meshes combined: torch refuses a mixture, which tensor parallelism makes by splitting some parameters
    of a model and leaving the others whole on each of its ranks. A whole one counts once. max_norm 0 measures
    without clipping.
    """
    groups: dict[DeviceMesh | None, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    norms = [_norm(group) for group in groups.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm > 0:
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm.float()


def _norm(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).detach()
