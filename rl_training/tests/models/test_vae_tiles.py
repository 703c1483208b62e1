"""Tiled decode: its blending against Diffusers' decode of each tile under autograd, its error, and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch.nn import functional

from rl_training.tests.models.test_vae_decoder import LAYOUTS, make_vae
from rl_training.tests.ranks import run_ranks
from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.models.wan.vae_backward import result_and_gradient
from wan_trainer.models.wan.vae_decoder import decode_frames
from wan_trainer.models.wan.vae_tiles import TileGrid, decode_tiled, tile_grid

SCALES = {"wan2.1": 8, "wan2.2": 16, "small": 2}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[AutoencoderKLWan, int]:
    """A VAE of each layout and its pixels a latent side."""
    return make_vae(request.param), SCALES[request.param]


def small_vae() -> AutoencoderKLWan:
    """Wan2.1's structure with two levels: 2 x 2 pixels a latent, 2 (f - 1) + 1 frames."""
    torch.manual_seed(0)
    values: dict[str, Any] = {"base_dim": 4, "z_dim": 3, "dim_mult": [1, 2], "num_res_blocks": 1}
    values |= {"temperal_downsample": [True], "scale_factor_spatial": 2, "scale_factor_temporal": 2}
    return AutoencoderKLWan(**values).double().eval().requires_grad_(False)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradient(pixels: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
    """Of an objective that couples all pixels and all videos, for the latents."""
    weight = noise(*pixels.shape, seed=1)
    (result,) = torch.autograd.grad((pixels * weight).mean() + (pixels - pixels.mean()).pow(2).mean(), x0)
    return result


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def by_masks(
    decode: Callable[[torch.Tensor], torch.Tensor],
    z: torch.Tensor,
    spans: tuple[list[tuple[int, int]], list[tuple[int, int]]],
    overlap: int,
    scale: int,
) -> torch.Tensor:
    """The blend, written out: every tile on a frame of its own times its weights, over the sum of weights."""

    def mask(start: int, stop: int, length: int) -> torch.Tensor:
        values = torch.zeros(length * scale, dtype=torch.float64)
        for pixel in range(start * scale, stop * scale):
            inner = [pixel + 0.5 - start * scale] if start else []
            inner += [stop * scale - pixel - 0.5] if stop < length else []
            values[pixel] = min([1.0, *(distance / (overlap * scale) for distance in inner)])
        return values

    height, width = z.shape[-2:]
    pixels, weights = 0.0, 0.0
    for top, bottom in spans[0]:
        for left, right in spans[1]:
            tile = decode(z[..., top:bottom, left:right])
            sides = [left, width - right, top, height - bottom]
            weight = mask(top, bottom, height)[:, None] * mask(left, right, width)
            pixels = pixels + functional.pad(tile, [side * scale for side in sides]) * weight
            weights = weights + weight
    assert isinstance(pixels, torch.Tensor)
    return pixels / weights


@pytest.mark.parametrize(("batch", "frames"), [(1, 2), (2, 1), (3, 1)])
def test_tiles_blend_as_written_out_over_diffusers_decode(
    layout: tuple[AutoencoderKLWan, int], batch: int, frames: int
) -> None:
    vae, scale = layout
    z = noise(batch, 3, frames, 4, 5).requires_grad_()
    grid = tile_grid(4, 5, scale, (3, 3), overlap=1)
    found = decode_tiled(lambda part: decode_frames(vae, part), z, grid, 4 * frames - 3)
    # The last row of tiles is smaller than the others.
    spans = ([(0, 3), (2, 4)], [(0, 3), (2, 5)])
    expected = by_masks(lambda part: vae.decode(part, return_dict=False)[0], z, spans, 1, scale)
    # Values as in the test of the whole decoder: float32 in Diffusers' upsampling may round the other way.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    assert relative(gradient(found, z), gradient(expected, z)) < 1e-6


@pytest.mark.parametrize("batch", (1, 2, 3))
def test_one_tile_is_the_exact_decode(layout: tuple[AutoencoderKLWan, int], batch: int) -> None:
    vae, scale = layout
    z = noise(batch, 3, 1, 2, 3).requires_grad_()
    exact = decode_frames(vae, z)
    for tile in (None, (2, 3), (5, 7)):
        found = decode_tiled(lambda part: decode_frames(vae, part), z, tile_grid(2, 3, scale, tile, 1), 1)
        assert torch.equal(found, exact)
        assert torch.equal(gradient(found, z), gradient(decode_frames(vae, z), z))


STATED = {8: (0.02, 0.4), 16: (0.06, 0.4)}
"""By pixels a latent side, the errors of docs/performance.md: the root mean square of the pixels' over their
standard deviation, the norm of the gradient's over its norm."""


@pytest.mark.parametrize("batch", (1, 2, 3))
def test_the_error_of_tiles_is_within_what_is_stated(
    layout: tuple[AutoencoderKLWan, int], batch: int
) -> None:
    vae, scale = layout
    z = noise(batch, 3, 1, 8, 8).requires_grad_()
    exact = decode_frames(vae, z)
    found = decode_tiled(lambda part: decode_frames(vae, part), z, tile_grid(8, 8, scale, (6, 6), 4), 1)
    of_values, of_gradient = STATED[scale]
    error = float((found - exact).detach().norm() / exact.detach().sub(exact.mean().detach()).norm())
    assert 0 < error < of_values
    assert 0 < relative(gradient(found, z), gradient(exact, z)) < of_gradient


@pytest.mark.parametrize(
    ("length", "size", "overlap", "spans"),
    [
        (7, 3, 0, [(0, 3), (3, 6), (6, 7)]),
        (8, 4, 3, [(0, 4), (1, 5), (2, 6), (3, 7), (4, 8)]),
        (9, 4, 2, [(0, 4), (2, 6), (4, 8), (6, 9)]),
        (4, 4, 3, [(0, 4)]),
        (3, 8, 2, [(0, 3)]),
    ],
)
def test_tiles_cover_the_frame_and_their_shares_add_up_to_one(
    length: int, size: int, overlap: int, spans: list[tuple[int, int]]
) -> None:
    grid = tile_grid(length, length, 4, (size, size), overlap)
    rows = [(tile.rows.start, tile.rows.stop) for tile in grid.tiles]
    assert rows == [span for span in spans for _ in spans]
    assert [(tile.columns.start, tile.columns.stop) for tile in grid.tiles] == spans * len(spans)
    share = torch.zeros(1, 3, 1, length * 4, length * 4, dtype=torch.float64)
    grid.blend({i: torch.ones_like(grid.pixels(share, i)) for i in grid.own}, share)
    torch.testing.assert_close(share, torch.ones_like(share), rtol=0, atol=1e-14)


def test_bfloat16_tiles_are_blended_in_float32_and_every_video_has_its_own_pixels() -> None:
    x0 = torch.randn(3, 2, 1, 4, 6, dtype=torch.bfloat16).requires_grad_()

    def decode(part: torch.Tensor) -> torch.Tensor:
        return part[:, :1].repeat_interleave(2, 3).repeat_interleave(2, 4).expand(-1, 3, -1, -1, -1)

    found = decode_tiled(decode, x0, tile_grid(4, 6, 2, (3, 3), 2), 1)
    assert found.dtype == torch.float32
    # Equal tiles blend to what they are: in bfloat16, weights that add up to 1 would not.
    torch.testing.assert_close(found, decode(x0).float(), rtol=1e-6, atol=0)
    (of_x0,) = torch.autograd.grad(found.sum(), x0)
    torch.testing.assert_close(of_x0[:, 0], torch.full((3, 1, 4, 6), 12.0, dtype=torch.bfloat16))


CASES = {"two tiles": ((2, 2, 5), (1, 2, 3)), "five tiles": ((1, 2, 11), (2,))}
"""Latent frames, height and width, in tiles of 3 x 3 that share 1; and numbers of videos."""


def decode_on_groups() -> dict[tuple[str, int, int], list[bytes]]:
    """In each rank: what it gets with every group that it belongs to, by case, videos and ranks.

    Rank 0 adds what it gets without a group, as of 0 ranks.
    """
    mesh = init_mesh("cpu", 60.0)
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3, 4)}
    vae = small_vae()

    def results(z: torch.Tensor, grid: TileGrid) -> list[bytes]:
        def decode(part: torch.Tensor) -> torch.Tensor:
            return decode_frames(vae, part)

        frames = 2 * z.shape[2] - 1
        pixels = decode_tiled(decode, z, grid, frames)
        with torch.no_grad():
            silent = decode_tiled(decode, z, grid, frames)
        tensors = [pixels.detach(), silent, gradient(pixels, z)]
        if len(z) == 2:
            tensors += result_and_gradient(
                decode, z.detach(), lambda x: (x.pow(3).mean() + x.var(), x.detach().clone()), grid, frames
            )
        assert all(tensor.std() > 0 for tensor in tensors)
        return [tensor.numpy().tobytes() for tensor in tensors]

    report: dict[tuple[str, int, int], list[bytes]] = {}
    for case, (shape, batches) in CASES.items():
        for batch in batches:
            z = noise(batch, 3, *shape).requires_grad_()
            if mesh.rank == 0:
                report[case, batch, 0] = results(z, tile_grid(*shape[1:], 2, (3, 3), 1))
            for size, group in groups.items():
                if mesh.rank < size:
                    grid = tile_grid(*shape[1:], 2, (3, 3), 1, group)
                    assert len(grid.own) > 0 or (case == "two tiles" and mesh.rank > 1)
                    report[case, batch, size] = results(z, grid)
    return report


def test_tiles_spread_over_ranks_give_every_rank_what_one_rank_gets_alone() -> None:
    reports = run_ranks(4, decode_on_groups)
    assert [len(report) for report in reports] == [4 * 5, 4 * 3, 4 * 2, 4]
    for rank, report in enumerate(reports):
        for (case, batch, size), found in report.items():
            # Bit for bit: pixels with and without autograd, their gradient, and both of two phases.
            equal = [a == b for a, b in zip(found, reports[0][case, batch, 0], strict=True)]
            assert all(equal), (case, batch, size, rank, equal)
