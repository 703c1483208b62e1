"""Liger's Triton kernels in place of Wan's norms: same parameters, same names, float32 inside as before."""

from __future__ import annotations

from collections import Counter

import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn
from torch.distributed.tensor import DTensor

from wan_trainer.types import UserError, first_line

try:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
except ImportError as error:  # no Triton for this platform, or the package was left out
    LigerLayerNormFunction = LigerRMSNormFunction = None
    _missing = first_line(error)
else:
    _missing = ""


class LigerRMSNorm(nn.Module):
    """torch.nn.RMSNorm over the last dim, y = x / sqrt(mean(x^2) + eps) * weight, by Liger's kernel.

    Everything is computed in float32 and rounded once to x's dtype, as torch's CUDA kernel does (Liger calls
    that casting "gemma"; its default rounds before the weight). The gradient is not written over the
    incoming one, which autograd may still need.
    """

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        assert norm.eps is not None
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) to (..., D) in x's dtype."""
        return LigerRMSNormFunction.apply(x, self.weight, self.eps, 0.0, "gemma", False, None)  # pyright: ignore[reportOptionalMemberAccess]


class LigerLayerNorm(nn.Module):
    """Diffusers' FP32LayerNorm over the last dim, with weight and bias, by Liger's kernel.

    Input, weight and bias of any dtype; statistics and result in float32, rounded once to x's dtype.
    """

    def __init__(self, norm: FP32LayerNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.bias = norm.bias
        self.eps = norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) to (..., D) in x's dtype."""
        return LigerLayerNormFunction.apply(x, self.weight, self.bias, self.eps)  # pyright: ignore[reportOptionalMemberAccess]


def use_liger(expert: WanTransformer3DModel, device: torch.device) -> None:
    """Replace the expert's norms in place: affine FP32LayerNorm and plain torch RMSNorm.

    Norms without parameters stay: Liger's layer norm always multiplies by a weight and adds a bias. Call it
    after tensor parallelism, whose sharded norms are classes of their own and stay too, and before
    compilation and FSDP, which hold on to modules. Raises UserError where Triton or CUDA is missing.
    """
    check_liger(device)
    replace_norms(expert)


def check_liger(device: torch.device) -> None:
    """Raise UserError, with the reason, where Liger's kernels cannot run."""
    if device.type != "cuda":
        raise UserError(
            f"use_liger_kernel: true needs a CUDA device, and this run is on {device.type}; use "
            "--no-use_liger_kernel"
        )
    if _missing:
        raise UserError(
            f"use_liger_kernel: true: liger-kernel does not import ({_missing}); use --no-use_liger_kernel"
        )


def replace_norms(expert: nn.Module) -> None:
    """Swap the modules, whatever the device."""
    for parent in list(expert.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child)
            if replacement is not None:
                setattr(parent, name, replacement.train(child.training))


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(getattr(module, "weight", None), DTensor):
        return None
    # Exactly these classes: a subclass may compute something else.
    if type(module) is FP32LayerNorm and module.elementwise_affine and module.bias is not None:
        return LigerLayerNorm(module)
    if type(module) is nn.RMSNorm and module.elementwise_affine:
        return LigerRMSNorm(module)
    return None


def liger_report(expert: nn.Module) -> str:
    """Which modules are Liger's and how many, such as "60 norm_q, 60 norm_k, 30 norm2"; empty for none."""
    counts = Counter(
        name.rpartition(".")[2]
        for name, module in expert.named_modules()
        if isinstance(module, LigerRMSNorm | LigerLayerNorm)
    )
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
