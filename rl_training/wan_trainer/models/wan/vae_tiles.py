"""Decoding a frame in overlapping tiles, on one rank or spread over the ranks of a group.

An approximation: the decoder's middle block attends over the whole frame, and its convolutions see zeros
where a tile ends. A linear ramp over the overlap blends neighbours. One tile as large as the frame is the
exact decode.

Spread over ranks, tile i is decoded by rank i modulo their number, and every rank gets every tile's pixels
and, in the backward pass, the gradient of every tile's latents. Both are added up tile by tile in the same
order as on one rank, so that results do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Decode = Callable[[torch.Tensor], torch.Tensor]
"""Latents (B, z, f, h, w) to pixels (B, 3, F, scale h, scale w)."""


@dataclass(frozen=True)
class Tile:
    """A rectangle of the latent frame and the share that its pixels have in the result.

    row_weights, column_weights: float64, one for each pixel; the share is their product. Over all tiles the
    shares of a pixel add up to 1.
    """

    rows: slice
    columns: slice
    row_weights: torch.Tensor
    column_weights: torch.Tensor


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a frame of height x width latents, `scale` pixels a latent side.

    group: the ranks that share the work; they hold the same latents and call together. None: this rank alone.
    """

    height: int
    width: int
    scale: int
    tiles: tuple[Tile, ...]
    group: dist.ProcessGroup | None = None

    @property
    def own(self) -> range:
        """Which tiles this rank decodes: possibly none."""
        if self.group is None:
            return range(len(self.tiles))
        return range(self.group.rank(), len(self.tiles), self.group.size())

    def latents(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The tile's part of (..., h, w) latents, a view."""
        return x[..., self.tiles[index].rows, self.tiles[index].columns]

    def pixels(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The tile's part of (..., H, W) pixels, a view."""
        return x[
            ..., _times(self.tiles[index].rows, self.scale), _times(self.tiles[index].columns, self.scale)
        ]

    def weighted(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """(..., H, W) pixels of the tile times their share, in at least float32."""
        tile, dtype = self.tiles[index], at_least_float32(x.dtype)
        share = tile.row_weights[:, None] * tile.column_weights
        return x.to(dtype) * share.to(x.device, dtype)

    def canvas(self, batch: int, frames: int, like: torch.Tensor) -> torch.Tensor:
        """Zeros (batch, 3, frames, H, W) for `blend`, in at least float32, on the device of `like`."""
        height, width = self.height * self.scale, self.width * self.scale
        dtype = at_least_float32(like.dtype)
        return torch.zeros(batch, 3, frames, height, width, dtype=dtype, device=like.device)

    def blend(self, own: Mapping[int, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Add the pixels of every tile to `out` (B, 3, F, H, W); `own` has those of this rank's tiles."""
        for index, part in self._everybodys(own, out, self.pixels):
            self.pixels(out, index).add_(self.weighted(part, index))
        return out

    def add_latents(self, own: Mapping[int, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Add every tile's gradient to that of the latents, `out` (B, z, f, h, w); `own` as in `blend`."""
        for index, part in self._everybodys(own, out, self.latents):
            self.latents(out, index).add_(part)
        return out

    def _everybodys(
        self,
        own: Mapping[int, torch.Tensor],
        whole: torch.Tensor,
        cut: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for index in range(len(self.tiles)):
            if self.group is None:
                yield index, own[index]
                continue
            like = cut(whole, index)
            if index in own:
                part = own[index].to(whole.dtype).contiguous()
                assert part.shape == like.shape, (part.shape, like.shape)
            else:
                part = torch.empty(like.shape, dtype=whole.dtype, device=whole.device)
            dist.broadcast(part, group=self.group, group_src=index % self.group.size())
            yield index, part


def tile_grid(
    height: int,
    width: int,
    scale: int,
    tile: tuple[int, int] | None = None,
    overlap: int = 0,
    group: dist.ProcessGroup | None = None,
) -> TileGrid:
    """Tiles of at most `tile` = (height, width) latents over a frame of height x width latents.

    Neighbours share `overlap` latents; the last row and column may be smaller. tile None: one for the whole
    frame.
    """
    rows, columns = tile or (height, width)
    overlap = overlap if tile else 0
    assert 0 <= overlap < min(rows, columns), (overlap, rows, columns)
    tiles = tuple(
        Tile(row, column, row_weights, column_weights)
        for row, row_weights in _axis(height, rows, overlap, scale)
        for column, column_weights in _axis(width, columns, overlap, scale)
    )
    return TileGrid(height, width, scale, tiles, group)


def decode_tiled(decode: Decode, x0: torch.Tensor, grid: TileGrid, frames: int) -> torch.Tensor:
    """Pixels (B, 3, frames, H, W) of (B, z, f, h, w) latents, tile by tile, blended in at least float32.

    Differentiable in x0. The gradient is added up in at least float32 too. Spread over ranks, it is right on
    each of them when all differentiate the same function of the pixels.
    """
    assert x0.shape[-2:] == (grid.height, grid.width), (x0.shape, grid)
    *parts, token = _Cut.apply(x0, grid)  # pyright: ignore[reportGeneralTypeIssues]
    decoded = [decode(part) for part in parts]
    result = _Blend.apply(grid, (len(x0), frames), token, *decoded)
    assert isinstance(result, torch.Tensor)
    return result


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class _Cut(torch.autograd.Function):
    """This rank's tiles of the latents and a token, which gives a rank without tiles a backward pass too:
    the others wait for it in theirs."""

    @staticmethod
    def forward(ctx: Any, x0: torch.Tensor, grid: TileGrid) -> tuple[torch.Tensor, ...]:
        ctx.grid, ctx.shape, ctx.dtype = grid, x0.shape, x0.dtype
        return (*(grid.latents(x0, index).clone() for index in grid.own), x0.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        grid: TileGrid = ctx.grid
        *parts, token = gradients
        out = torch.zeros(ctx.shape, dtype=at_least_float32(ctx.dtype), device=token.device)
        grid.add_latents(dict(zip(grid.own, parts, strict=True)), out)
        return out.to(ctx.dtype), None


class _Blend(torch.autograd.Function):
    """All tiles' pixels, from those of this rank's tiles and the token."""

    @staticmethod
    def forward(
        ctx: Any, grid: TileGrid, shape: tuple[int, int], token: torch.Tensor, *own: torch.Tensor
    ) -> torch.Tensor:
        ctx.grid, ctx.token, ctx.dtypes = grid, token.dtype, [part.dtype for part in own]
        batch, frames = shape
        out = grid.canvas(batch, frames, token)
        return grid.blend(dict(zip(grid.own, own, strict=True)), out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grid: TileGrid = ctx.grid
        (gradient,) = gradients
        parts = (
            grid.weighted(grid.pixels(gradient, index), index).to(dtype)
            for index, dtype in zip(grid.own, ctx.dtypes, strict=True)
        )
        return None, None, gradient.new_zeros((), dtype=ctx.token), *parts


def _axis(length: int, size: int, overlap: int, scale: int) -> list[tuple[slice, torch.Tensor]]:
    """Intervals of at most `size` latents that cover `length`, and the shares of their pixels."""
    starts = [0]
    while starts[-1] + size < length:
        starts.append(starts[-1] + size - overlap)
    spans = [slice(start, min(start + size, length)) for start in starts]
    total = torch.zeros(length * scale, dtype=torch.float64)
    ramps: list[torch.Tensor] = []
    for span in spans:
        pixels = (span.stop - span.start) * scale
        centres = torch.arange(pixels, dtype=torch.float64) + 0.5
        ramp = torch.ones(pixels, dtype=torch.float64)
        if span.start > 0 and overlap:
            ramp = torch.minimum(ramp, centres / (overlap * scale))
        if span.stop < length and overlap:
            ramp = torch.minimum(ramp, centres.flip(0) / (overlap * scale))
        total[_times(span, scale)] += ramp
        ramps.append(ramp)
    return [(span, ramp / total[_times(span, scale)]) for span, ramp in zip(spans, ramps, strict=True)]


def _times(span: slice, scale: int) -> slice:
    return slice(span.start * scale, span.stop * scale)
