"""Rows of tokens grouped by expert: where each (token, choice) pair's row lies, and moving rows.

An expert's rows are one *segment* of a row array. Segments follow one another in the order of the
experts and start at multiples of 8 rows, because TMA addresses a swizzled tile of 8 rows at a
time; rows between segments hold anything. An expert's tiles are the runs of `tile_rows` rows from
its segment's start. The number of rows and tiles in use is data; the sizes of the arrays are the
most that the shapes allow.

`segments` is XLA without a sort or a scatter, in few launches (each costs 1 to 2 us of a layer's
255, whatever it does): counting by comparison gives, in one fusion, the rank of a pair among its
expert's, the size of a segment and its start; many pairs are counted in two levels.
A start does not wait for the sizes: with u earlier pairs in all lower experts, 8 * floor((u + 7e) /
8) leaves every lower segment room for its last 8 rows. The cumulated numbers of tiles do wait, and
are a by-product of `spread`.

`spread` (token -> its k rows) and `combine` (k rows -> token, weighted, in the order of the
choices) are kernels of one CTA per token and column block: they move T * k * D elements each at
the speed of memory, where XLA's gathers of the same rows reach a fifth of it (measured, H200, 2048
tokens of 8 rows of 2048: 111 us against 22). Neither needs atomics. A row's place depends on the
other tokens, its values never do. With many tokens `list_tokens` takes the place of `spread`: it
writes which token a row is, and `gate_up` gathers the rows itself.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat, row_gather

ALIGNMENT = 8  # rows; segments start at multiples of it
_LANES = 128  # a kernel's vectors are multiples of a warpgroup's threads
_PAIRS_PER_CHUNK = 512
_MOST_PAIRS_IN_ONE_CHUNK = 2048
_PAIRS_PER_CTA = 512  # of `list_tokens`: four a thread


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where the rows of T * k pairs lie; int32, a pair is token * k + choice.

    Expert e's entry of `starts` and `counts` is at `first_start + e` and `first_count + e`: they
    are parts of larger arrays because a slice of an array is a launch.
    """

    places: jax.Array  # [T * k, ...] rows; -1 for a pair without one
    starts: jax.Array
    counts: jax.Array
    choices: int = dataclasses.field(metadata={"static": True})
    first_start: int = dataclasses.field(metadata={"static": True})
    first_count: int = dataclasses.field(metadata={"static": True})


def most_rows(pairs: int, num_experts: int) -> int:
    """Returns how many rows the segments of any routing fit in."""
    return _aligned(pairs + (ALIGNMENT - 1) * num_experts, ALIGNMENT)


def padded_experts(num_experts: int) -> int:
    """Returns the number of entries of `counts`: experts, then empty ones."""
    return _aligned(num_experts, _LANES)


def segments(expert_ids: jax.Array, used: jax.Array, *, num_experts: int) -> Segments:
    """Returns the segments of routing int32 [T, k]; pairs that are not used (bool) get no row."""
    E = padded_experts(num_experts)
    pairs = expert_ids.size
    experts = jnp.where(used, expert_ids, E).reshape(-1)
    if pairs > _MOST_PAIRS_IN_ONE_CHUNK:
        return _segments_of_chunks(experts, expert_ids.shape[1], E)
    ids = jnp.arange(E, dtype=jnp.int32)
    place = jnp.arange(pairs, dtype=jnp.int32)
    # Pairs ask for the pairs before them, experts for all.
    keys = jnp.concatenate([experts, ids])  # [pairs + E]
    ends = jnp.concatenate([place, jnp.full(E, pairs, jnp.int32)])
    equal = (experts == keys[:, None]) & (place < ends[:, None])  # never materialised
    counts = jnp.sum(equal, axis=1, dtype=jnp.int32)
    lower = jnp.sum(experts < keys[:, None], axis=1, dtype=jnp.int32)
    starts = _start(lower, keys)
    places = jnp.where(keys < E, starts + jnp.where(ends < pairs, counts, 0), -1)
    return Segments(
        places=places,
        starts=places,
        counts=counts,
        choices=expert_ids.shape[1],
        first_start=pairs,
        first_count=pairs,
    )


def _segments_of_chunks(experts: jax.Array, choices: int, E: int) -> Segments:
    """Counts in chunks of pairs first, then over chunks: fewer comparisons for many pairs."""
    pairs = experts.size
    C = _PAIRS_PER_CHUNK
    chunks = -(-pairs // C)
    experts = jnp.pad(experts, (0, chunks * C - pairs), constant_values=E).reshape(chunks, 1, C)
    ids = jnp.arange(E, dtype=jnp.int32)
    place = jnp.arange(C, dtype=jnp.int32)
    keys = experts.reshape(chunks, C, 1)
    ranks = jnp.sum((experts == keys) & (place < place[:, None]), axis=2, dtype=jnp.int32)
    counts = jnp.sum(experts == ids[:, None], axis=2, dtype=jnp.int32)  # [chunks, E]
    chunk = jnp.arange(chunks, dtype=jnp.int32)
    earlier = (chunk < jnp.arange(chunks + 1, dtype=jnp.int32)[:, None])[:, :, None]
    totals = jnp.sum(jnp.where(earlier, counts, 0), axis=1)  # [chunks + 1, E]
    lower = jnp.sum(jnp.where(ids < ids[:, None], totals[-1], 0), axis=1)
    starts = _start(lower, ids)
    first = starts + totals[:-1]  # of the part of a segment that a chunk fills
    found = jnp.take_along_axis(first, jnp.minimum(experts[:, 0], E - 1), axis=1)
    places = jnp.where(experts[:, 0] < E, found + ranks, -1).reshape(-1)[:pairs]
    return Segments(
        places=places,
        starts=starts,
        counts=totals.reshape(-1),
        choices=choices,
        first_start=0,
        first_count=chunks * E,
    )


def _start(lower_pairs: jax.Array, expert: jax.Array) -> jax.Array:
    return (lower_pairs + (ALIGNMENT - 1) * expert) // ALIGNMENT * ALIGNMENT


def _aligned(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _column_blocks(tokens: int, width: int) -> int:
    """Returns into how many blocks of columns a token's row is cut: enough CTAs for few tokens."""
    return width // math.gcd(width, 512) if tokens <= 512 else 1


def spread(
    x: jax.Array,
    where: Segments,
    *,
    num_experts: int,
    rows: int,
    tile_rows: int,
    has_shared: bool,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (row array [rows, D], cumulated tiles [num_experts + has_shared]).

    Each token's row is at its pairs' places, other rows hold anything. Expert e's tiles of
    `tile_rows` rows end at entry e; the shared expert's, those of all tokens, come last.
    """
    T, D = x.shape
    choices = where.choices
    blocks = _column_blocks(T, D)

    def spread_rows(x_gmem, places_gmem, counts_gmem, out_gmem, tile_ends_gmem):
        cta = lax.axis_index("cta")

        @pl.when(cta < T * blocks)
        def _copy_row():
            token = lax.div(cta, jnp.int32(blocks))
            columns = pl.ds(lax.rem(cta, jnp.int32(blocks)) * (D // blocks), D // blocks)
            row = x_gmem[token, columns]
            places = [places_gmem[token * choices + choice] for choice in range(choices)]
            for place in places:

                @pl.when(place >= 0)
                def _(place=place):
                    out_gmem[place, columns] = row

        @pl.when(cta >= T * blocks)
        def _count_tiles():
            expert = cta - T * blocks
            tile_ends_gmem[expert] = _tile_end(
                expert, counts_gmem, where, num_experts=num_experts, tile_rows=tile_rows, tokens=T
            )

    return compat.kernel(
        spread_rows,
        out_type=[
            jax.ShapeDtypeStruct((rows, D), x.dtype),
            jax.ShapeDtypeStruct((num_experts + has_shared,), jnp.int32),
        ],
        grid=(T * blocks + num_experts + has_shared,),
        grid_names=("cta",),
        interpret=interpret,
    )(x, where.places, where.counts)


def list_tokens(
    where: Segments,
    *,
    tokens: int,
    num_experts: int,
    rows: int,
    tile_rows: int,
    has_shared: bool,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (token of each row, cumulated tiles [num_experts + has_shared]), both int32.

    As `spread`, but a row is named, not copied: entries between segments hold anything. The shared
    expert's rows, all tokens in order, begin at `rows`; their number is rounded up as an expert's.
    """
    choices = where.choices
    pairs = tokens * choices
    ctas = -(-pairs // _PAIRS_PER_CTA)

    def list_rows(places_gmem, counts_gmem, list_gmem, tile_ends_gmem):
        cta = lax.axis_index("cta")

        @pl.when(cta < ctas)
        def _list_pairs():
            for first in range(0, _PAIRS_PER_CTA, _LANES):
                row_gather.write_list(
                    places_gmem,
                    list_gmem,
                    cta * _PAIRS_PER_CTA + first,
                    pairs=pairs,
                    choices=choices,
                    copies_at=rows if has_shared else None,
                    interpret=interpret,
                )

        @pl.when(cta >= ctas)
        def _count_tiles():
            expert = cta - ctas
            tile_ends_gmem[expert] = _tile_end(
                expert, counts_gmem, where,
                num_experts=num_experts, tile_rows=tile_rows, tokens=tokens,
            )  # fmt: skip

    entries = rows + has_shared * _aligned(tokens, ALIGNMENT)
    return compat.kernel(
        list_rows,
        out_type=[
            jax.ShapeDtypeStruct((entries,), jnp.int32),
            jax.ShapeDtypeStruct((num_experts + has_shared,), jnp.int32),
        ],
        grid=(ctas + num_experts + has_shared,),
        grid_names=("cta",),
        interpret=interpret,
    )(where.places, where.counts)


def _tile_end(
    expert, counts_gmem, where: Segments, *, num_experts: int, tile_rows: int, tokens: int
):
    """Returns how many tiles this and all earlier experts have; `num_experts` is the shared one."""
    E = padded_experts(num_experts)
    counts = counts_gmem[pl.ds(where.first_count, E)]
    tiles = lax.div(counts + (tile_rows - 1), jnp.full((E,), tile_rows, jnp.int32))
    earlier = lax.broadcasted_iota(jnp.int32, (E,), 0) <= jnp.full((E,), expert)
    shared_tiles = jnp.where(expert == num_experts, -(-tokens // tile_rows), 0)
    return jnp.sum(jnp.where(earlier, tiles, 0)) + shared_tiles


def combine(
    rows: jax.Array,
    weights: jax.Array,
    where: Segments,
    *,
    shared_row: int | None,
    out_dtype,
    interpret=None,
) -> jax.Array:
    """Returns [T, D] in `out_dtype`: the sum of weight * row, float32 [T, k], over used pairs.

    Token t's row of the shared expert, at `shared_row` + t, is added at weight 1.
    """
    T, choices = weights.shape
    D = rows.shape[1]
    blocks = _column_blocks(T, D)

    def combine_rows(rows_gmem, weights_gmem, places_gmem, out_gmem):
        token = lax.axis_index("token")
        columns = pl.ds(lax.axis_index("columns") * (D // blocks), D // blocks)
        pairs = [token * choices + choice for choice in range(choices)]
        places = [places_gmem[pair] for pair in pairs]
        # All loads before the first use: their latencies overlap.
        parts = [rows_gmem[jnp.maximum(place, 0), columns] for place in places]
        total = jnp.zeros((D // blocks,), jnp.float32)
        if shared_row is not None:
            shared = rows_gmem[shared_row + token, columns]
        for pair, place, part in zip(pairs, places, parts, strict=True):
            weighted = part.astype(jnp.float32) * weights_gmem[pair]
            # A pair without a row read row 0, which may hold anything: select, do not multiply.
            used = jnp.broadcast_to(place >= 0, weighted.shape)
            total += jnp.where(used, weighted, 0.0)
        if shared_row is not None:
            total += shared.astype(jnp.float32)
        out_gmem[token, columns] = total.astype(out_dtype)

    return compat.kernel(
        combine_rows,
        out_type=jax.ShapeDtypeStruct((T, D), out_dtype),
        grid=(T, blocks),
        grid_names=("token", "columns"),
        interpret=interpret,
    )(rows, weights.reshape(-1), where.places)
