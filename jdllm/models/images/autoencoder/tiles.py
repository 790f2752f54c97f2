"""A block of the decoder in tiles, with the result of the whole picture.

A convolution sees few neighbours, so a tile with a margin gives its part exactly. A norm of groups
sees the whole picture. So there is a pass over all tiles for each such norm: it runs the block up
to that norm, with the moments of earlier norms, and pools this norm's moments over the tiles. The
last pass writes the result. So tiles differ from the whole picture by rounding only: there are no
seams to blend. The price is time: at 2048 x 2048 pixels Flux's published decoder does 2.8 times the
work. Memory beyond a tile is the input and the output of the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jdllm.models.images.autoencoder import layers
from jdllm.models.images.autoencoder.layers import Activate, ChannelNorm, Moments, Norm, Picture

# block(x, activate): doubles both sides of x; every norm is in a call of `activate`.
Block = Callable[[Picture, Activate], Picture]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Tiles of a picture: the input has `size` positions, the output twice as many a side.

    All tiles have one shape. So the last tile of a row or column may overlap the one before it.
    A place is the (row, column) of a tile in the grid.
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
        """Returns two masks over the output of a tile with its margin.

        The first is true inside the picture. The second is 1 where this tile counts for the
        moments: each position of the picture counts in one tile.
        """
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

    `num_norms` counts the norms that see the whole picture: all of the block's, or none.
    `num_convolutions` counts those of size 3 that follow each other after the doubling.
    """
    B, height, width, C = x.shape
    grid = Grid(size=(height, width), largest=largest, margin=-(-num_convolutions // 2))
    margins = (grid.margin, grid.margin)
    padded = jnp.pad(x, ((0, 0), margins, margins, (0, 0)))

    shape = (B, *(side + 2 * grid.margin for side in grid.tile), C)

    def run_tile(
        place: tuple[Array, Array], known: Sequence[Moments]
    ) -> tuple[Picture, Moments | None]:
        """Returns the output of a tile, margin included, and the moments at the next norm."""
        row, column = grid.begins(place)
        tile = jax.lax.dynamic_slice(padded, (0, row, column, 0), shape)
        return _in_tile(block, tile, known, *grid.masks(place))

    places = tuple(axis.ravel() for axis in jnp.indices(grid.count))
    known: list[Moments] = []
    while len(known) < num_norms:
        # XLA leaves out what follows the norm, since only its moments are used.
        _, parts = jax.lax.scan(lambda _, place: (None, run_tile(place, known)[1]), None, places)
        assert parts is not None, "a norm of groups has moments"
        known.append(parts.pooled())

    def write(whole: Picture, place: tuple[Array, Array]) -> tuple[Picture, None]:
        row, column = grid.begins(place)
        inner = slice(2 * grid.margin, -2 * grid.margin)
        part = run_tile(place, known)[0][:, inner, inner]
        return jax.lax.dynamic_update_slice(whole, part, (0, 2 * row, 2 * column, 0)), None

    out = jax.eval_shape(lambda x: block(x, layers.activate), x)
    return jax.lax.scan(write, jnp.zeros(out.shape, out.dtype), places)[0]


def _in_tile(
    block: Block,
    tile: Picture,
    known: Sequence[Moments],
    inside: Bool[Array, "H W"],
    counted: Float32[Array, "H W"],
) -> tuple[Picture, Moments | None]:
    """Returns block(tile) with the known moments, and the tile's own at the norm after those."""
    own: list[Moments] = []

    def normed(norm: Norm, x: Picture) -> Picture:
        if isinstance(norm, ChannelNorm):
            return norm(x)
        own.append(norm.moments(x, counted))
        is_known = len(own) <= len(known)
        return norm(x, known[len(own) - 1] if is_known else own[-1])

    def activate(norm: Norm, x: Picture) -> Picture:
        # A convolution must see zeros outside the picture.
        active = jnp.where(inside[:, :, None], jax.nn.silu(normed(norm, x)), 0)
        return active.astype(x.dtype)

    out = block(tile, activate)
    return out, own[min(len(known), len(own) - 1)] if own else None
