"""Rows of tokens grouped by expert: where each (token, choice) pair's row lies.

An expert's rows are one *segment* of a row array. Segments follow one another in the order of the
experts and start at multiples of 8 rows, because TMA addresses a swizzled tile of 8 rows at a
time; rows between segments hold anything. An expert's tiles are the runs of `tile_rows` rows from
its segment's start. The number of rows and tiles in use is data; the sizes of the arrays are the
most that the shapes allow. A row's place depends on the other tokens, its values never do.

Nothing is sorted. A pair's row is its segment's start plus the number of earlier pairs of the same
expert, and a start needs no cumulated sizes: with u pairs in all lower experts, 8 * floor((u + 7e) /
8) leaves every lower segment room for its last 8 rows. Both are counts over all pairs. Up to 4096
pairs, one kernel counts them anew for every pair, a vector comparison and a sum, and scatters the
results. Beyond, XLA counts in chunks of pairs and then over chunks. Only the cumulated numbers of
tiles wait for the sizes; they are a second, tiny launch. (A launch costs 2 to 3 us of a layer's
260, whatever it does.)

`combine` sums a token's k rows, weighted, in the order of the choices, with one CTA per token and
column block: it moves T * k * D elements at the speed of memory, where XLA's gather of the same
rows reaches a fifth of it (measured, H200, 2048 tokens of 8 rows of 2048: 111 us against 22).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat

ALIGNMENT = 8  # rows; segments start at multiples of it
_LANES = 128  # a kernel's vectors are multiples of a warpgroup's threads
_PAIRS_PER_CHUNK = 512
_MOST_PAIRS_IN_ONE_KERNEL = 4096
_LOWER = 1 << 16  # weight of the second count in a packed pair of counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where the rows of T * k pairs lie; int32, a pair is token * k + choice."""

    places: jax.Array  # [T * k] row of a pair; -1 for one without
    tokens: jax.Array  # [rows] token of a row; anything between segments
    starts: jax.Array  # [E] first row of an expert's segment
    counts: jax.Array  # [E] rows of it
    tile_ends: jax.Array  # [E] tiles of this and all earlier experts


def most_rows(pairs: int, num_experts: int) -> int:
    """Returns how many rows the segments of any routing fit in."""
    return _aligned(pairs + (ALIGNMENT - 1) * num_experts, ALIGNMENT)


def segments(
    expert_ids: jax.Array, used: jax.Array, *, num_experts: int, tile_rows: int, interpret=None
) -> Segments:
    """Returns the segments of routing int32 [T, k]; pairs that are not used (bool) get no row."""
    pairs = expert_ids.size
    rows = max(most_rows(pairs, num_experts), tile_rows)
    experts = jnp.where(used, expert_ids, num_experts)
    if pairs > _MOST_PAIRS_IN_ONE_KERNEL:
        places, tokens, starts, counts = _count_in_chunks(experts, num_experts, rows)
    else:
        places, tokens, starts, counts = _count_at_once(experts, num_experts, rows, interpret)
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    tiles = (counts + tile_rows - 1) // tile_rows
    return Segments(
        places=places,
        tokens=tokens,
        starts=starts,
        counts=counts,
        tile_ends=jnp.sum(jnp.where(ids <= ids[:, None], tiles, 0), axis=1),
    )


def _count_at_once(experts: jax.Array, num_experts: int, rows: int, interpret):
    """Returns (places, tokens, starts, counts) from a kernel of one CTA per token and expert."""
    T, choices = experts.shape
    pairs = T * choices
    padded = _aligned(pairs, _LANES)
    experts = jnp.pad(experts.reshape(-1), (0, padded - pairs), constant_values=num_experts)

    def place_pairs(experts_gmem, places_gmem, tokens_gmem, starts_gmem, counts_gmem):
        cta = lax.axis_index("cta")
        every = experts_gmem[pl.ds(0, padded)]
        number = lax.broadcasted_iota(jnp.int32, (padded,), 0)

        def count(expert, before):
            """Returns (start of the expert's segment, its pairs before a pair)."""
            key = jnp.full((padded,), expert)
            equal = jnp.where((every == key) & (number < jnp.full((padded,), before)), 1, 0)
            packed = jnp.sum(equal + jnp.where(every < key, _LOWER, 0))
            start = lax.div(packed, jnp.int32(_LOWER)) + (ALIGNMENT - 1) * expert
            return (
                lax.div(start, jnp.int32(ALIGNMENT)) * ALIGNMENT,
                lax.rem(packed, jnp.int32(_LOWER)),
            )

        @pl.when(cta < T)
        def _place():
            for choice in range(choices):
                pair = cta * choices + choice
                expert = experts_gmem[pair]
                start, earlier = count(expert, pair)
                used = expert < num_experts
                places_gmem[pair] = jnp.where(used, start + earlier, -1)

                @pl.when(used)
                def _(place=start + earlier):
                    tokens_gmem[place] = cta

        @pl.when(cta >= T)
        def _measure():
            expert = cta - T
            starts_gmem[expert], counts_gmem[expert] = count(expert, jnp.int32(padded))

    lengths = (pairs, rows, num_experts, num_experts)
    return compat.kernel(
        place_pairs,
        out_type=[jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths],
        grid=(T + num_experts,),
        grid_names=("cta",),
        interpret=interpret,
    )(experts)


def _count_in_chunks(experts: jax.Array, num_experts: int, rows: int):
    """Returns (places, tokens, starts, counts) with fewer comparisons, in more launches."""
    choices = experts.shape[1]
    pairs = experts.size
    E, C = num_experts, _PAIRS_PER_CHUNK
    chunks = -(-pairs // C)
    experts = jnp.pad(experts.reshape(-1), (0, chunks * C - pairs), constant_values=E)
    experts = experts.reshape(chunks, 1, C)
    ids = jnp.arange(E, dtype=jnp.int32)
    place = jnp.arange(C, dtype=jnp.int32)
    keys = experts.reshape(chunks, C, 1)
    earlier = jnp.sum((experts == keys) & (place < place[:, None]), axis=2, dtype=jnp.int32)
    counts = jnp.sum(experts == ids[:, None], axis=2, dtype=jnp.int32)  # [chunks, E]
    lower = jnp.sum(experts.reshape(-1) < ids[:, None], axis=1, dtype=jnp.int32)  # [E]
    chunk = jnp.arange(chunks, dtype=jnp.int32)
    before = (chunk < jnp.arange(chunks + 1, dtype=jnp.int32)[:, None])[:, :, None]
    totals = jnp.sum(jnp.where(before, counts, 0), axis=1)  # [chunks + 1, E]
    starts = (lower + (ALIGNMENT - 1) * ids) // ALIGNMENT * ALIGNMENT
    first = starts + totals[:-1]  # of the part of a segment that a chunk fills
    found = jnp.take_along_axis(first, jnp.minimum(experts[:, 0], E - 1), axis=1)
    places = jnp.where(experts[:, 0] < E, found + earlier, -1).reshape(-1)[:pairs]
    pair = jnp.arange(pairs, dtype=jnp.int32)
    nowhere = rows + pair  # distinct, to be dropped
    tokens = jnp.zeros(rows, jnp.int32).at[jnp.where(places < 0, nowhere, places)]
    tokens = tokens.set(pair // choices, mode="drop", unique_indices=True)
    return places, tokens, starts, totals[-1]


def _aligned(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def combine(
    rows: jax.Array, weights: jax.Array, where: Segments, *, out_dtype, interpret=None
) -> jax.Array:
    """Returns [T, D] in `out_dtype`: the sum of weight * row, float32 [T, k], over used pairs."""
    T, choices = weights.shape
    D = rows.shape[1]
    blocks = D // math.gcd(D, 512) if T <= 512 else 1  # more CTAs for few tokens

    def combine_rows(rows_gmem, weights_gmem, places_gmem, out_gmem):
        token = lax.axis_index("token")
        columns = pl.ds(lax.axis_index("columns") * (D // blocks), D // blocks)
        pairs = [token * choices + choice for choice in range(choices)]
        places = [places_gmem[pair] for pair in pairs]
        # All loads before the first use: their latencies overlap.
        parts = [rows_gmem[jnp.maximum(place, 0), columns] for place in places]
        total = jnp.zeros((D // blocks,), jnp.float32)
        for pair, place, part in zip(pairs, places, parts, strict=True):
            weighted = part.astype(jnp.float32) * weights_gmem[pair]
            # A pair without a row read row 0, which may hold anything: select, do not multiply.
            used = jnp.broadcast_to(place >= 0, weighted.shape)
            total += jnp.where(used, weighted, 0.0)
        out_gmem[token, columns] = total.astype(out_dtype)

    return compat.kernel(
        combine_rows,
        out_type=jax.ShapeDtypeStruct((T, D), out_dtype),
        grid=(T, blocks),
        grid_names=("token", "columns"),
        interpret=interpret,
    )(rows, weights.reshape(-1), where.places)
