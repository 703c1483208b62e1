"""Gradient norm and clipping over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before, 0-d
    float32.

    Works on plain and on sharded (DTensor) parameters of one device mesh. max_norm 0 measures without
    clipping.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradient if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return norm.detach().float()
