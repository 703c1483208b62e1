"""The whole-sequence decoder: Diffusers' streaming decode bit for bit, its gradients, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import nn
from torch.nn import functional

from wan_trainer.models.wan.frozen_conv import frozen_conv
from wan_trainer.models.wan.vae_decoder import decode_frames

LAYOUTS = ("wan2.1", "wan2.2")
FRAMES = (1, 2, 3, 5)
"""Latent frames; videos of 1, 5, 9 and 17."""


def make_vae(layout: str) -> AutoencoderKLWan:
    """Either layout at a small width, float64, with norms and biases that are not the identity."""
    values: dict[str, Any] = {
        "base_dim": 4,
        "z_dim": 3,
        "dim_mult": [1, 2, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * 3,
        "latents_std": [1.0] * 3,
    }
    if layout == "wan2.2":
        values |= {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
        values |= {"decoder_base_dim": 4, "scale_factor_spatial": 16}
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**values).double().eval().requires_grad_(False)
    for name, parameter in vae.named_parameters():
        if parameter.ndim == 1 or "gamma" in name:
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    return vae


@pytest.fixture(scope="module", params=LAYOUTS)
def vae(request: pytest.FixtureRequest) -> AutoencoderKLWan:
    return make_vae(request.param)


def by_taps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    """A convolution of stride 1 that adds products in one fixed order, whatever the size of its input.

    Matrix products, which the real one is made of, round the last bit by how many columns there are.
    """
    stride, padding, dilation, groups = rest
    assert set((*stride, *dilation, groups)) == {1}
    sides = [side for pad in reversed(padding) for side in (pad, pad)]
    x = functional.pad(x, sides)
    sizes = [have - kernel + 1 for have, kernel in zip(x.shape[2:], weight.shape[2:], strict=True)]
    total = torch.zeros(x.shape[0], weight.shape[0], *sizes, dtype=x.dtype)
    for channel, tap in product(range(weight.shape[1]), product(*(range(n) for n in weight.shape[2:]))):
        place = tuple(slice(at, at + size) for at, size in zip(tap, sizes, strict=True))
        factors = weight[(slice(None), channel, *tap)].reshape(-1, *(1 for _ in sizes))
        total = total + x[(slice(None), slice(channel, channel + 1), *place)] * factors
    return total if bias is None else total + bias.reshape(-1, *(1 for _ in sizes))


@pytest.fixture
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(functional, "conv2d", by_taps)
    monkeypatch.setattr(functional, "conv3d", by_taps)
    yield


def latents(batch: int, frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * batch + frames)
    return torch.randn(batch, 3, frames, 2, 3, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("batch", "frames"), list(product((1, 2, 3), FRAMES)))
def test_the_pixels_are_those_of_the_streaming_decode_bit_for_bit(
    vae: AutoencoderKLWan, exact_convolutions: None, batch: int, frames: int
) -> None:
    z = latents(batch, frames)
    with torch.no_grad():
        expected = vae.decode(z, return_dict=False)[0]
        found = decode_frames(vae, z)
    assert found.shape == (len(z), 3, 4 * (frames - 1) + 1, *expected.shape[3:])
    assert torch.equal(found, expected) and expected.std() > 0.05


@pytest.mark.parametrize(("batch", "frames"), list(zip((1, 1, 3, 2), FRAMES, strict=True)))
def test_pixels_and_gradients_of_the_real_convolutions(
    vae: AutoencoderKLWan, batch: int, frames: int
) -> None:
    z = latents(batch, frames).requires_grad_()
    other = z.detach().clone().requires_grad_()
    expected = vae.decode(z, return_dict=False)[0]
    found = decode_frames(vae, other)
    # A value that rounds to the other float32 neighbour in an upsampling is 1e-8 off.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    weight = torch.randn_like(expected)
    (of_expected,) = torch.autograd.grad((expected * weight).sum(), z)
    (of_found,) = torch.autograd.grad((found * weight).sum(), other)
    assert of_expected.norm() > 0
    assert (of_found - of_expected).norm() <= 1e-7 * of_expected.norm()


def test_a_trained_parameter_elsewhere_gets_no_gradient_from_the_decoder(vae: AutoencoderKLWan) -> None:
    copy = make_vae("wan2.1").requires_grad_(True)
    decode_frames(copy, latents(1, 2).requires_grad_()).sum().backward()
    convolutions = [m for m in copy.decoder.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    assert all(parameter.grad is None for m in convolutions for parameter in m.parameters())


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv3d(3, 5, (3, 1, 2), padding=(1, 0, 1)), (2, 3, 4, 5, 6)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False), (3, 4, 7, 8)),
    ],
)
def test_a_frozen_convolution_has_the_plain_ones_input_gradient_and_keeps_no_input(
    conv: nn.Conv2d | nn.Conv3d, shape: tuple[int, ...]
) -> None:
    conv = conv.double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = frozen_conv(conv, x)
    assert torch.equal(y, conv(x)) and kept == []
    weight = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad((y * weight).sum(), x), torch.autograd.grad((conv(x) * weight).sum(), x)
    )
    with torch.no_grad():
        assert not frozen_conv(conv, x).requires_grad


def elements_kept(decode: Callable[[torch.Tensor], torch.Tensor], z: torch.Tensor) -> int:
    """Elements of the tensors that the graph of one decode holds."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pixels = decode(z)
    assert pixels.requires_grad
    return sum(kept.values())


def test_between_forward_and_backward_little_is_kept(vae: AutoencoderKLWan) -> None:
    z = latents(1, 3).requires_grad_()
    ours = elements_kept(lambda z: decode_frames(vae, z), z)
    streamed = elements_kept(lambda z: vae.decode(z, return_dict=False)[0], z)
    assert ours < streamed / 8, (ours, streamed)
