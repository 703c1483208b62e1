"""Convolutions with frozen weights: their backward needs the weight and the input's shape, not the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional, grad


class _FrozenConv(torch.autograd.Function):
    """`conv2d` or `conv3d` whose gradient is that of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, conv: nn.Conv2d | nn.Conv3d) -> torch.Tensor:
        ctx.conv, ctx.shape = conv, x.shape
        return _convolve(conv, x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        conv: nn.Conv2d | nn.Conv3d = ctx.conv
        # torch.nn.grad stands a zero-stride tensor in for the input: nothing of its size is allocated.
        of_input = grad.conv3d_input if isinstance(conv, nn.Conv3d) else grad.conv2d_input
        return (
            of_input(
                ctx.shape,
                conv.weight,
                gradients[0],
                conv.stride,  # pyright: ignore[reportArgumentType]
                conv.padding,  # pyright: ignore[reportArgumentType]
                conv.dilation,  # pyright: ignore[reportArgumentType]
                conv.groups,
            ),
            None,
        )


def frozen_conv(conv: nn.Conv2d | nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    """`conv(x)` of a plain convolution, whatever its subclass does, keeping no activation for the backward.

    The weight and bias get no gradient. conv: zero padding only.
    """
    assert conv.padding_mode == "zeros", conv.padding_mode
    if torch.is_grad_enabled() and x.requires_grad:
        result = _FrozenConv.apply(x, conv)
        assert isinstance(result, torch.Tensor)
        return result
    return _convolve(conv, x)


def _convolve(conv: nn.Conv2d | nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    convolve = functional.conv3d if isinstance(conv, nn.Conv3d) else functional.conv2d
    return convolve(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
