"""The two-phase backward: plain autograd's gradient, and never two graphs at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_training.tests.models.families import Loaded
from rl_training.tests.models.test_vae_decoder import LAYOUTS, make_vae
from rl_training.tests.models.test_vae_tiles import SCALES, noise, relative, small_vae
from wan_trainer.config.specs import Family, VaeTiling
from wan_trainer.models.wan import vae as vae_module
from wan_trainer.models.wan.vae import decode, decode_differentiable, differentiate_decoded
from wan_trainer.models.wan.vae_backward import result_and_gradient
from wan_trainer.models.wan.vae_decoder import decode_frames
from wan_trainer.models.wan.vae_tiles import decode_tiled, tile_grid


def loss_of(pixels: torch.Tensor) -> torch.Tensor:
    """A scalar that couples all pixels and all videos."""
    weight = noise(*pixels.shape, seed=1).to(pixels.dtype)
    return (pixels * weight).mean() + (pixels.pow(2).mean() + 0.1).sqrt()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_phases_give_the_gradient_of_plain_autograd_through_diffusers_decode(layout: str) -> None:
    vae = make_vae(layout)
    x0 = noise(2, 3, 2, 2, 3).requires_grad_()
    pixels = vae.decode(x0, return_dict=False)[0]
    (expected,) = torch.autograd.grad(loss_of(pixels), x0)
    with torch.no_grad():
        result, found = result_and_gradient(
            lambda z: decode_frames(vae, z),
            x0.detach(),
            lambda leaf: (loss_of(leaf), leaf.detach().clone()),
            tile_grid(2, 3, SCALES[layout]),
            5,
        )
    # float32 in Diffusers' upsampling may round the other way; the gradient of this input does not see it.
    torch.testing.assert_close(result, pixels, rtol=0, atol=1e-7)
    assert found.dtype == torch.float64 and relative(found, expected) < 1e-8


class Token:
    """Lives as long as the graph that holds it."""


class Marked(torch.autograd.Function):
    """The identity, whose node holds a token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: list[weakref.ref[Token]]) -> torch.Tensor:
        ctx.token = Token()
        tokens.append(weakref.ref(ctx.token))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def test_at_most_one_graph_is_alive_the_objectives_or_one_pieces() -> None:
    vae = small_vae()
    tokens: list[weakref.ref[Token]] = []

    def alive() -> int:
        return sum(token() is not None for token in tokens)

    def piece(z: torch.Tensor) -> torch.Tensor:
        assert alive() == 0
        pixels = decode_frames(vae, z)
        assert len(z) == 1 or not z.requires_grad
        return Marked.apply(pixels, tokens) if pixels.requires_grad else pixels  # type: ignore[return-value]

    def objective(pixels: torch.Tensor) -> tuple[torch.Tensor, str]:
        assert alive() == 0 and pixels.is_leaf and pixels.requires_grad
        marked = Marked.apply(pixels, tokens)
        assert isinstance(marked, torch.Tensor) and alive() == 1
        return loss_of(marked), "seen"

    x0 = noise(2, 3, 2, 4, 5)
    grid = tile_grid(4, 5, 2, (3, 3), 1)
    result, found = result_and_gradient(piece, x0, objective, grid, 3)
    assert result == "seen" and len(tokens) == 1 + 2 * 4 and alive() == 0
    leaf = x0.clone().requires_grad_()
    pixels = decode_tiled(lambda z: decode_frames(vae, z), leaf, grid, 3)
    (expected,) = torch.autograd.grad(loss_of(pixels), leaf)
    assert relative(found, expected) < 1e-8


def test_a_loss_that_ignores_the_pixels_has_no_gradient_and_costs_no_decode() -> None:
    differentiated: list[bool] = []

    def piece(z: torch.Tensor) -> torch.Tensor:
        differentiated.append(torch.is_grad_enabled())
        return z[:, :1].expand(-1, 3, -1, -1, -1)

    x0, grid = torch.randn(2, 3, 1, 2, 2), tile_grid(2, 2, 1)
    result, found = result_and_gradient(piece, x0, lambda leaf: (torch.tensor(3.0), "none"), grid, 1)
    assert result == "none" and torch.equal(found, torch.zeros_like(x0))
    # Only the first video counts in the objective.
    _, found = result_and_gradient(piece, x0, lambda leaf: (leaf[0].sum(), None), grid, 1)
    assert found[0].abs().sum() > 0 and found[1].abs().sum() == 0
    assert differentiated.count(True) == 1


@pytest.mark.parametrize("family", ["ti2v-5b", "t2v-1.3b"])
def test_normalised_latents_decode_to_the_rollouts_pixels_with_a_gradient(
    load: Callable[..., Loaded], family: Family
) -> None:
    components = load(family).components
    vae, scale = components.vae, 16 if family == "ti2v-5b" else 8
    x0 = noise(2, 4, 2, 2, 3).float().requires_grad_()
    pixels = decode_differentiable(components, x0)
    assert pixels.dtype == torch.float32 and pixels.shape == (2, 3, 5, 2 * scale, 3 * scale)
    assert pixels.min() >= 0 and pixels.max() <= 1
    rollout = torch.from_numpy(decode(components, x0.detach(), 1)).permute(0, 4, 1, 2, 3)
    assert (pixels.detach() * 255 - rollout).abs().max() < 0.51

    (plain,) = torch.autograd.grad(loss_of(pixels), x0)
    config = vae.config
    mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    leaf = x0.detach().clone().requires_grad_()
    expected_pixels = vae.decode(leaf * std + mean, return_dict=False)[0] / 2 + 0.5
    (expected,) = torch.autograd.grad(loss_of(expected_pixels), leaf)
    assert expected.norm() > 0 and relative(plain, expected) < 1e-4
    whole = VaeTiling(height=2 * scale, width=3 * scale, overlap=0)
    for tiling in (None, whole):
        result, found = differentiate_decoded(
            components, x0.detach(), lambda leaf: (loss_of(leaf), leaf.detach().clone()), tiling
        )
        assert found.dtype == torch.float32 and relative(found, expected) < 1e-4
        assert (result - pixels).abs().max() < 1e-5
    tiles = VaeTiling(height=2 * scale, width=2 * scale, overlap=scale)
    assert decode_differentiable(components, x0, tiles).shape == pixels.shape
    with torch.no_grad():
        assert not decode_differentiable(components, x0, tiles).requires_grad


def test_the_vae_is_resident_while_it_decodes_and_not_while_the_objective_runs(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    components = replace(load("t2v-1.3b").components, offload=True)
    resting = components.vae.decoder.conv_in.weight
    seen: list[str] = []

    def note(what: str) -> None:
        seen.append(f"{what} {'at rest' if components.vae.decoder.conv_in.weight is resting else 'resident'}")

    def watched(vae: Any, latents: torch.Tensor) -> torch.Tensor:
        note("decode")
        pixels = decode_frames(vae, latents)
        if pixels.requires_grad:
            pixels.register_hook(lambda _: note("backward"))
        return pixels

    def objective(pixels: torch.Tensor) -> tuple[torch.Tensor, None]:
        note("objective")
        return pixels.sum(), None

    monkeypatch.setattr(vae_module, "decode_frames", watched)
    differentiate_decoded(components, torch.randn(1, 4, 1, 2, 2), objective)
    assert seen == ["decode resident", "objective at rest", "decode resident", "backward resident"]
    assert components.vae.decoder.conv_in.weight is resting
