"""Wan's VAE decoder over the whole time axis at once, with a gradient for the latents and little memory.

Diffusers' `AutoencoderKLWan.decode` goes through the latent frames one by one and carries the last two frames
of every convolution's input along. That is right for inference; under autograd every step keeps its graph.
Here the same modules, with the same weights, run once over all frames: a causal convolution that is
zero-padded in front sees what the cached one sees. Only the first latent frame is special: time upsampling
passes it by, so that f latent frames become 4 (f - 1) + 1 frames.

The decoder is frozen, so only activations have gradients. Every segment is checkpointed inside a checkpointed
block: the backward pass holds the inputs of one block's segments, and the activations of one segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AutoencoderKLWan,
    WanAttentionBlock,
    WanCausalConv3d,
    WanResample,
    WanResidualBlock,
    WanResidualUpBlock,
    WanUpBlock,
    unpatchify,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from wan_trainer.models.wan.frozen_conv import frozen_conv

Segment = Callable[[torch.Tensor], torch.Tensor]


def decode_frames(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Pixels of (B, z, f, h, w) latents in the VAE's own scale: (B, 3, 4 (f - 1) + 1, H, W) in [-1, 1].

    Equal to `vae.decode(latents)`, in float64 bit for bit. Differentiable in the latents alone: parameters
    get no gradient. The clamp to [-1, 1] is Diffusers'; the gradient is 0 outside.
    """
    decoder = vae.decoder
    x = _causal(vae.post_quant_conv, latents)
    x = _run(lambda x: _middle(decoder, x), x)
    for block in decoder.up_blocks:
        x = _run(lambda x, block=block: _up(block, x), x)
    x = _run(lambda x: _causal(decoder.conv_out, decoder.nonlinearity(decoder.norm_out(x))), x)
    patch: int | None = vae.config["patch_size"]
    if patch is not None:
        x = unpatchify(x, patch_size=patch)
    return x.clamp(-1.0, 1.0)


def decode_videos(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """`decode_frames` where a gradient is asked for; else Diffusers' own decode, one video after the other.

    The memory of the latter does not grow with the frames. Both round differently.
    """
    if torch.is_grad_enabled() and latents.requires_grad:
        return decode_frames(vae, latents)
    return torch.cat([vae.decode(video, return_dict=False)[0] for video in latents.split(1)])


def _run(segment: Segment, x: torch.Tensor) -> torch.Tensor:
    """`segment(x)`, computed again in the backward pass instead of keeping its activations."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return segment(x)
    result = checkpoint(segment, x, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, torch.Tensor)
    return result


def _causal(conv: Any, x: torch.Tensor) -> torch.Tensor:
    """A convolution that sees this frame and those before it; before the first there are zeros."""
    assert isinstance(conv, WanCausalConv3d), type(conv)
    sides = [int(side) for side in conv._padding]
    return frozen_conv(conv, functional.pad(x, sides))


def _middle(decoder: Any, x: torch.Tensor) -> torch.Tensor:
    x = _causal(decoder.conv_in, x)
    middle = decoder.mid_block
    x = _residual(middle.resnets[0], x)
    for attention, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
        x = _residual(resnet, _run(lambda x, attention=attention: _attention(attention, x), x))
    return x


def _up(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One level of either layout: Wan2.1's, and Wan2.2's with its parameter-free shortcut."""
    assert isinstance(block, WanUpBlock | WanResidualUpBlock), type(block)
    start = x
    for resnet in block.resnets:
        x = _residual(resnet, x)
    upsampler = block.upsampler if isinstance(block, WanResidualUpBlock) else (block.upsamplers or [None])[0]
    if upsampler is not None:
        x = _run(lambda x: _resample(upsampler, x), x)
    if isinstance(block, WanResidualUpBlock) and block.avg_shortcut is not None:
        x = x + block.avg_shortcut(start, first_chunk=True)
    return x


def _residual(block: Any, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(block, WanResidualBlock), type(block)
    shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else _causal(block.conv_shortcut, x)
    for norm, conv in ((block.norm1, block.conv1), (block.norm2, block.conv2)):
        x = _run(lambda x, norm=norm, conv=conv: _causal(conv, block.nonlinearity(norm(x))), x)
    return x + shortcut


def _attention(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Single-head attention within each frame."""
    assert isinstance(block, WanAttentionBlock), type(block)
    batch, channels, frames, height, width = x.shape
    flat = block.norm(x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width))
    qkv = frozen_conv(block.to_qkv, flat).reshape(batch * frames, 1, channels * 3, -1)
    q, k, v = qkv.permute(0, 1, 3, 2).contiguous().chunk(3, dim=-1)
    mixed = functional.scaled_dot_product_attention(q, k, v)
    mixed = mixed.squeeze(1).permute(0, 2, 1).reshape(batch * frames, channels, height, width)
    mixed = frozen_conv(block.proj, mixed).view(batch, frames, channels, height, width)
    return mixed.permute(0, 2, 1, 3, 4) + x


def _resample(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Twice the height and width and, in "upsample3d", twice the frames after the first."""
    assert isinstance(block, WanResample) and block.mode in ("upsample2d", "upsample3d"), block
    if block.mode == "upsample3d" and x.shape[2] > 1:
        first, rest = x[:, :, :1], x[:, :, 1:]
        batch, channels, frames, height, width = rest.shape
        # The first frame is no history of the others here: Diffusers' cache starts empty after it.
        pairs = _causal(block.time_conv, rest).reshape(batch, 2, channels, frames, height, width)
        rest = pairs.permute(0, 2, 3, 1, 4, 5).reshape(batch, channels, frames * 2, height, width)
        x = torch.cat([first, rest], dim=2)
    batch, channels, frames, height, width = x.shape
    flat = x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width)
    upsample, conv = block.resample.children()
    assert isinstance(conv, nn.Conv2d), conv
    flat = frozen_conv(conv, upsample(flat))
    return flat.view(batch, frames, *flat.shape[1:]).permute(0, 2, 1, 3, 4)
