"""A block of the decoder in tiles, with the result of the whole picture.

A convolution sees few neighbours, so a tile with a margin gives its part exactly. A norm sees the
whole picture. So there is a pass over all tiles for each norm: it runs the block up to that norm,
with the moments of earlier norms, and pools this norm's moments over the tiles. The last pass
writes the result. So tiles differ from the whole picture by rounding only: there are no seams to
blend, and the price is time (a block of 7 norms takes about 6 times as long).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jdllm.models.images.autoencoder import layers
from jdllm.models.images.autoencoder.layers import Activate, GroupNorm, Moments, Picture

# block(x, activate): doubles both sides of x; every norm is in a call of `activate`.
Block = Callable[[Picture, Activate], Picture]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Tiles of a picture: the input has `size` positions, the output twice as many a side.

    Tiles at the end begin earlier than `places` times their size, so that all have one shape.
    """

    size: tuple[int, int]
    largest: int  # positions of the output per side of a tile, without its margin
    margin: int  # positions of the input on each side of a tile

    @property
    def count(self) -> tuple[int, int]:
        """The number of tiles down and across."""
        height, width = (-(-side // (self.largest // 2)) for side in self.size)
        return height, width

    @property
    def tile(self) -> tuple[int, int]:
        """The size of every tile in the input, without margin."""
        height, width = (-(-side // count) for side, count in zip(self.size, self.count))
        return height, width

    def begins(self, place: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns the first row and column of a tile in the input, without margin."""
        y, x = (
            jnp.minimum(at * tile, side - tile)
            for at, tile, side in zip(place, self.tile, self.size)
        )
        return y, x

    def masks(self, place: tuple[Array, Array]) -> tuple[Bool[Array, "H W"], Float32[Array, "H W"]]:
        """Returns where a tile with margin lies in the picture, and what it alone counts."""
        inside, counted = [], []
        for at, begin, tile, side in zip(place, self.begins(place), self.tile, self.size):
            index = 2 * (begin - self.margin) + jnp.arange(2 * (tile + 2 * self.margin))
            inside.append((index >= 0) & (index < 2 * side))
            counted.append((index >= 2 * at * tile) & (index < 2 * (begin + tile)))
        rows_inside, columns_inside = inside
        rows_counted, columns_counted = counted
        return (
            rows_inside[:, None] & columns_inside,
            (rows_counted[:, None] & columns_counted).astype(jnp.float32),
        )


def run(
    block: Block, x: Picture, *, num_norms: int, num_convolutions: int, largest: int
) -> Picture:
    """Returns `block(x, layers.activate)`, computed in tiles of at most `largest` a side.

    `num_convolutions` counts those of size 3 that follow each other after the doubling.
    """
    B, height, width, _ = x.shape
    grid = Grid(size=(height, width), largest=largest, margin=-(-num_convolutions // 2))
    margins = (grid.margin, grid.margin)
    padded = jnp.pad(x, ((0, 0), margins, margins, (0, 0)))

    def decode(place: tuple[Array, Array], known: Sequence[Moments]) -> tuple[Picture, Moments]:
        """Returns the output of a tile, margin included, and the moments at the next norm."""
        y, x = grid.begins(place)
        shape = (B, *(side + 2 * grid.margin for side in grid.tile), padded.shape[-1])
        return _in_tile(
            block, jax.lax.dynamic_slice(padded, (0, y, x, 0), shape), known, *grid.masks(place)
        )

    places = tuple(axis.ravel() for axis in jnp.indices(grid.count))
    known: list[Moments] = []
    while len(known) < num_norms:
        # XLA leaves out what follows the norm, since only its moments are used.
        _, parts = jax.lax.scan(lambda _, place: (None, decode(place, known)[1]), None, places)
        known.append(parts.pooled())

    def write(whole: Picture, place: tuple[Array, Array]) -> tuple[Picture, None]:
        y, x = grid.begins(place)
        tile = decode(place, known)[0]
        inner = tile[:, *(slice(2 * grid.margin, -2 * grid.margin) for _ in range(2))]
        return jax.lax.dynamic_update_slice(whole, inner, (0, 2 * y, 2 * x, 0)), None

    out = jax.eval_shape(lambda x: block(x, layers.activate), x)
    return jax.lax.scan(write, jnp.zeros(out.shape, out.dtype), places)[0]


def _in_tile(
    block: Block,
    tile: Picture,
    known: Sequence[Moments],
    inside: Bool[Array, "H W"],
    counted: Float32[Array, "H W"],
) -> tuple[Picture, Moments]:
    """Returns block(tile) with the known moments, and the tile's own at the norm after those."""
    own: list[Moments] = []

    def activate(norm: GroupNorm, x: Picture) -> Picture:
        own.append(norm.moments(x, counted))
        is_known = len(own) <= len(known)
        active = jax.nn.silu(norm(x, known[len(own) - 1] if is_known else own[-1]))
        # A convolution must see zeros outside the picture.
        return jnp.where(inside[:, :, None], active, 0).astype(x.dtype)

    out = block(tile, activate)
    return out, own[min(len(known), len(own) - 1)]
