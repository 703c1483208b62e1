"""Run under TRITON_INTERPRET=1: Liger's norms against torch's, forward and backward, on the CPU."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from diffusers.models.normalization import FP32LayerNorm
from liger_kernel.ops import layer_norm as liger_layer_norm
from liger_kernel.ops import rms_norm as liger_rms_norm
from torch import nn
from triton.runtime import interpreter

from wan_trainer.models.wan.liger import LigerLayerNorm, LigerRMSNorm

_convert = interpreter._implicit_cvt


def _convert_numbers_too(argument: object) -> object:
    """Compiled kernels receive a Python float as a float32 scalar; the interpreter passes it as it is."""
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
    return _convert(argument)


interpreter._implicit_cvt = _convert_numbers_too


def _rsqrt(x: tl.tensor) -> tl.tensor:
    """CUDA's own rsqrt has no counterpart in the interpreter; Triton's is the same function."""
    return tl.math.rsqrt(x)


liger_layer_norm.rsqrt = liger_rms_norm.rsqrt = _rsqrt

# The tiny model's width, and one that is no power of two, as Wan's 3072 and 5120 are not.
WIDTHS = (64, 96)


def check(kind: str, width: int, x_dtype: torch.dtype, weight_dtype: torch.dtype, trained: bool) -> None:
    """Against float64, rounded where torch rounds: once, at the end."""
    generator = torch.Generator().manual_seed(width)
    norm: nn.Module
    norm = nn.RMSNorm(width, eps=1e-6) if kind == "rms" else FP32LayerNorm(width, eps=1e-6)
    for parameter in norm.parameters():
        parameter.data = torch.randn(width, generator=generator).to(weight_dtype)
        parameter.requires_grad_(trained)
    replaced = LigerRMSNorm(norm) if isinstance(norm, nn.RMSNorm) else LigerLayerNorm(norm)
    x = (3 * torch.randn(2, 5, width, generator=generator) + 1).to(x_dtype)
    upstream = torch.randn(2, 5, width, generator=generator).to(x_dtype)

    inputs = x.clone().requires_grad_()
    output = replaced(inputs)
    kept = upstream.clone()
    output.backward(kept)
    assert torch.equal(kept, upstream), "the incoming gradient is autograd's, not ours to overwrite"
    assert output.dtype == x_dtype

    exact = x.double().requires_grad_()
    weights = {name: p.detach().double().requires_grad_() for name, p in norm.named_parameters()}
    if kind == "rms":
        wanted = nn.functional.rms_norm(exact, (width,), weights["weight"], 1e-6)
    else:
        wanted = nn.functional.layer_norm(exact, (width,), weights["weight"], weights["bias"], 1e-6)
    wanted.backward(upstream.double())
    # One unit of bfloat16: the interpreter truncates where a GPU rounds.
    tolerance = 1e-5 if x_dtype == torch.float32 else 2**-7
    torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(inputs.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    for name, parameter in norm.named_parameters():
        if not trained:
            assert parameter.grad is None
            continue
        rounding = 1e-5 if weight_dtype == torch.float32 else 2**-7
        torch.testing.assert_close(parameter.grad.double(), weights[name].grad, rtol=rounding, atol=rounding)


if __name__ == "__main__":
    for name in ("rms", "layer"):
        for features in WIDTHS:
            check(name, features, torch.float32, torch.float32, trained=True)
            check(name, features, torch.bfloat16, torch.bfloat16, trained=True)
            check(name, features, torch.float32, torch.float32, trained=False)
    # Wan hands norm2 float32 activations while FSDP has cast its weight.
    check("layer", 64, torch.float32, torch.bfloat16, trained=True)
    print("all equal")  # noqa: T201 - read by the test
