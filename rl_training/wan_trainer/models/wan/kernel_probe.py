"""Whether this machine's GPU runs the kernels a configuration asks for: what preflight runs in a process."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _check_attention_backend_requirements
from diffusers.models.normalization import FP32LayerNorm
from torch import nn

from wan_trainer.config.attention import HUB_KERNELS
from wan_trainer.config.specs import Dtype
from wan_trainer.models.wan.attention import prove_attention
from wan_trainer.models.wan.hub_kernels import load_hub_kernel
from wan_trainer.models.wan.kernel_cache import kernels_cache
from wan_trainer.models.wan.liger import LigerLayerNorm, LigerRMSNorm, check_liger
from wan_trainer.sampling.dtypes import DTYPES
from wan_trainer.types import UserError, first_line

# Rounding once to bfloat16 and summing in another order.
TOLERANCE = 0.02


def kernel_problems(
    backend: str, head_dim: int, param_dtype: Dtype, use_liger: bool, device: str
) -> list[str]:
    """Run each kernel forward and backward on `device`; what fails, a line each."""
    where, dtype = torch.device(device), DTYPES[param_dtype]
    checks: list[Callable[[], None]] = [lambda: _check_attention(backend, head_dim, where, dtype)]
    if use_liger:
        checks.append(lambda: prove_liger(where, dtype))
    lines: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            lines += error.problems
    return lines


def _check_attention(backend: str, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
    if backend == "native":
        return
    if backend in HUB_KERNELS:
        load_hub_kernel(backend, kernels_cache(os.environ))
    try:
        _check_attention_backend_requirements(AttentionBackendName(backend))
    except RuntimeError as error:
        raise UserError(
            f"attention_backend {backend}: {first_line(error)}; use --attention_backend native"
        ) from None
    prove_attention(backend, head_dim, device, dtype)


def prove_liger(device: torch.device, dtype: torch.dtype) -> None:
    """Compare Liger's norms with torch's on `device`, forward and backward, at 128 rows of 1536 features.

    Raises UserError when a kernel does not compile or computes something else.
    """
    check_liger(device)
    generator = torch.Generator().manual_seed(0)
    norms = (nn.RMSNorm(1536, eps=1e-6), FP32LayerNorm(1536, eps=1e-6))
    for norm in norms:
        norm.to(device, dtype)
        kernel = LigerRMSNorm(norm) if isinstance(norm, nn.RMSNorm) else LigerLayerNorm(norm)
        x = torch.randn(128, 1536, generator=generator).to(device, dtype)
        results: list[list[torch.Tensor]] = []
        try:
            for module in (kernel, norm):
                inputs = x.clone().requires_grad_()
                output = module(inputs)
                gradients = torch.autograd.grad(output.float().square().sum(), [inputs, *norm.parameters()])
                results.append([output.detach(), *gradients])
        except Exception as error:  # noqa: BLE001 - Triton's compiler has exceptions of its own
            raise UserError(
                f"use_liger_kernel: true: {type(kernel).__name__} fails here ({first_line(error)}); use "
                "--no-use_liger_kernel"
            ) from None
        for found, wanted in zip(*results, strict=True):
            error = ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()
            if not error <= TOLERANCE:
                raise UserError(
                    f"use_liger_kernel: true: {type(kernel).__name__} is {error:.2g} away from torch on this "
                    "device; use --no-use_liger_kernel"
                )
