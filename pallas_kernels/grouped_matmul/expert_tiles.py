"""Rows of tokens grouped by expert: where each (token, choice) pair's row is, and moving rows.

An expert's rows are one *segment* of a row array. Segments follow one another in the order of the
experts and start at multiples of 8 rows, because TMA addresses a swizzled tile of 8 rows at a
time; rows between segments hold anything. An expert's tiles are blocks of `tile_rows` rows from its
segment's start. The number of rows and tiles in use is data; the sizes of the arrays are the most
that the shapes allow.

Counting the pairs (`expert_counts`) is part of the kernel that first needs the places, since every
launch costs 1 to 2 us of a layer's 255:

* `list_tokens`, for many tokens: one cluster counts, and writes for each row which token it is.
  `gate_up` gathers the rows itself.
* `spread`, for few: a CTA per token and column block copies the token to its k rows. Each CTA
  counts all pairs, a few a thread, and so need not wait for others.

A segment's start needs no sizes of single segments: expert e with u pairs in all lower experts
starts at 8 * floor((u + 7e) / 8), so every lower segment has room for its last 8 rows.

`combine` (k rows -> token, weighted, in the order of the choices) again has a CTA per token and
column block. Copying and combining each move T * k * D elements at the speed of memory; XLA's
gathers of the same rows reach a fifth of it (measured, H200, 2048 tokens of 8 rows of 2048: 111 us
against 22). Neither needs atomics. A row's place depends on the other tokens, its values never do.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.grouped_matmul import expert_counts
from pallas_kernels.grouped_matmul.expert_counts import ALIGNMENT
from pallas_kernels.hopper import compat, lane_code

_WARPGROUP = 4  # warps
_WARPS_OF_LIST = 16  # of a CTA of `list_tokens`
_MOST_CTAS_OF_LIST = 8  # the largest cluster that every Hopper GPU can launch
_MOST_PAIRS_OF_EVERY_CTA = 2048  # in `spread`: 16 a thread; more are counted beforehand
_PAIRS_PER_CTA = 1024  # in `list_tokens`, until its CTAs run out: two a thread


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where the rows of T * k pairs are; the number of a pair is token * k + choice."""

    places: Int32[Array, " T*k"]  # the row of each pair; -1 for a pair without one
    starts: Int32[Array, " E"]  # the first row of each expert
    counts: Int32[Array, " E"]  # rows of each expert
    tile_ends: Int32[Array, " E+shared"]  # tiles of this and all earlier experts


def most_rows(pairs: int, num_experts: int) -> int:
    """Returns how many rows the segments of any routing fit in."""
    return _aligned(pairs + (ALIGNMENT - 1) * num_experts)


def _aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def _column_blocks(tokens: int, width: int) -> int:
    """Returns the number of column blocks of a token's row: more for few tokens, to use the GPU."""
    return width // math.gcd(width, 512) if tokens <= 512 else 1


def spread(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T k"],
    valid: Bool[Array, " T"] | None,
    *,
    num_experts: int,
    rows: int,
    tile_rows: int,
    has_shared: bool,
    interpret: Any = None,
) -> tuple[Segments, Float[Array, "rows D"]]:
    """Returns (the segments of the routing, the row array).

    Each token's row is at the places of its pairs; other rows hold anything. Pairs whose id is not
    an expert's get no row, nor do pairs of tokens that are not `valid`. The tiles of the shared
    expert, which has all tokens, come last.
    """
    T, D = x.shape
    choices = expert_ids.shape[1]
    blocks = _column_blocks(T, D)
    options = {"num_experts": num_experts, "tile_rows": tile_rows, "has_shared": has_shared}
    routing = _routing(expert_ids, valid)
    counting = expert_counts.Counting(tokens=T, choices=choices, warps=_WARPGROUP, **options)
    counts_here = interpret is None and counting.pairs <= _MOST_PAIRS_OF_EVERY_CTA
    where = None
    if not counts_here:
        where, _ = list_tokens(expert_ids, valid, rows=rows, **options, interpret=interpret)
        routing = [where.places]

    def spread_rows(x_gmem, *refs):
        token, block = lax.axis_index("token"), lax.axis_index("columns")
        out_gmem = refs[len(routing)]
        columns = pl.ds(block * (D // blocks), D // blocks)
        row = x_gmem[token, columns]
        if counts_here:
            places_smem, *scratch = refs[-1 - len(counting.scratch()) :]
            written = [*refs[len(routing) + 1 :][:4], places_smem]
            place_token(refs[: len(routing)], written, scratch, token, block, counting)
            places = [places_smem[choice] for choice in range(choices)]
        else:
            places = [refs[0][token * choices + choice] for choice in range(choices)]
        for place in places:

            @pl.when(place >= 0)
            def _(place=place):
                out_gmem[place, columns] = row

    lists = _vectors(counting.pairs, *counting.lists()) if counts_here else []
    out, *lists = compat.kernel(
        spread_rows,
        out_type=[jax.ShapeDtypeStruct((rows, D), x.dtype), *lists],
        scratch_types=_buffers(choices, *counting.scratch()) if counts_here else [],
        grid=(T, blocks),
        grid_names=("token", "columns"),
        interpret=interpret,
    )(x, *routing)
    if where is None:
        where = _segments(*lists)
    return where, out


def place_token(
    routing: Sequence[Any],
    written: Sequence[Any],
    scratch: Sequence[Any],
    token: jax.Array,
    block: jax.Array,
    counting: expert_counts.Counting,
) -> None:
    """Places all pairs and writes those of one token; the first CTA also writes the expert lists.

    `written` are refs to places [T * k], starts, counts and tiles in global memory, and to the
    token's places [k] in shared memory.
    """
    refs = (*routing, *written, *scratch)
    scalar = plgpu.Layout.WG_SPLAT(())

    @compat.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs) + (scalar, scalar))
    def place(_, *arguments):
        *refs, token, block = arguments
        token, block = lane_code.scalar(token), lane_code.scalar(block)
        places_gmem, *lists, places_smem = refs[len(routing) :][: len(written)]

        def write(pair, has_row, row):
            row = lane_code.select(has_row, row, -1)
            is_mine = (pair // counting.choices).equals(token)
            with lane_code.when(is_mine):
                lane_code.store(places_smem, pair % counting.choices, row)
            with lane_code.when(is_mine & block.equals(0)):
                lane_code.store(places_gmem, pair, row)

        expert_counts.place_pairs(
            refs[: len(routing)],
            lists,
            refs[-len(scratch) :],
            counting,
            cta=lane_code.constant(0),
            writes_lists=token.equals(0) & block.equals(0),
            write=write,
        )
        lane_code.sync_cta()

    place(*refs, token, block)


def list_tokens(
    expert_ids: Int32[Array, "T k"],
    valid: Bool[Array, " T"] | None,
    *,
    num_experts: int,
    rows: int,
    tile_rows: int,
    has_shared: bool,
    interpret: Any = None,
) -> tuple[Segments, Int32[Array, " entries"]]:
    """Returns (the segments of the routing, the token of each row).

    It does the same as `spread`, but it lists the tokens of the rows and copies none. Entries
    between segments hold anything. The rows of the shared expert, all tokens in order, begin at
    `rows`; their number is rounded up to a multiple of 8.
    """
    T, choices = expert_ids.shape
    pairs = T * choices
    counting = counting_of_list(
        T, choices, num_experts=num_experts, tile_rows=tile_rows, has_shared=has_shared
    )
    routing = _routing(expert_ids, valid)
    entries = rows + has_shared * _aligned(T)
    if interpret is not None:
        places, *lists = expert_counts.reference(*routing, counting=counting)
        target = jnp.where(places < 0, entries, places)
        tokens = jnp.arange(pairs, dtype=jnp.int32) // choices
        row_tokens = jnp.full(entries, -1, jnp.int32).at[target].set(tokens, mode="drop")
        if has_shared:
            row_tokens = row_tokens.at[rows : rows + T].set(jnp.arange(T, dtype=jnp.int32))
        return _segments(places, *lists), row_tokens

    def list_rows(*refs):
        written = refs[len(routing) :][:5]
        scratch = refs[len(routing) + 5 :]
        cta = lax.axis_index("cta")
        place_and_list(refs[: len(routing)], written, scratch, cta, counting, rows)

    row_tokens, places, *lists = compat.kernel(
        list_rows,
        out_type=_vectors(entries, pairs, *counting.lists()),
        grid=(1,),
        grid_names=("cluster",),
        cluster=(counting.ctas,),
        cluster_names=("cta",),
        num_threads=counting.warps // _WARPGROUP,
        thread_name="warpgroup",
        scratch_types=_buffers(*counting.scratch()),
    )(*routing)
    return _segments(places, *lists), row_tokens


def counting_of_list(
    tokens: int, choices: int, *, num_experts: int, tile_rows: int, has_shared: bool
) -> expert_counts.Counting:
    """Returns how `list_tokens` counts: more pairs take more CTAs, up to the largest cluster."""
    ctas = 1
    while ctas < _MOST_CTAS_OF_LIST and tokens * choices > ctas * _PAIRS_PER_CTA:
        ctas *= 2
    return expert_counts.Counting(
        tokens=tokens,
        choices=choices,
        num_experts=num_experts,
        tile_rows=tile_rows,
        has_shared=has_shared,
        warps=_WARPS_OF_LIST,
        ctas=ctas,
    )


def place_and_list(
    routing: Sequence[Any],
    written: Sequence[Any],
    scratch: Sequence[Any],
    cta: jax.Array,
    counting: expert_counts.Counting,
    rows: int,
) -> None:
    """Places all pairs, and lists the tokens of their rows.

    With a shared expert it lists all tokens from `rows` on. `written` are refs to the list, places
    [T * k], starts, counts and tiles, all in global memory.
    """
    refs = (*routing, *written, *scratch)

    @compat.inline_mgpu(
        arg_types=(plgpu.RefType(),) * len(refs) + (plgpu.Layout.WG_SPLAT(()),),
    )
    def place(_, *arguments):
        *refs, cta = arguments
        cta = lane_code.scalar(cta)
        list_gmem, places_gmem, *lists = refs[len(routing) :][: len(written)]

        def write(pair, has_row, row):
            token, in_range = pair // counting.choices, pair < counting.pairs
            with lane_code.when(in_range):
                lane_code.store(places_gmem, pair, lane_code.select(has_row, row, -1))
            with lane_code.when(has_row):
                lane_code.store(list_gmem, row, token)
            if counting.has_shared:
                is_first = (pair % counting.choices).equals(0)
                with lane_code.when(in_range & is_first):
                    lane_code.store(list_gmem, token + rows, token)

        expert_counts.place_pairs(
            refs[: len(routing)],
            lists,
            refs[-len(scratch) :],
            counting,
            cta=cta,
            writes_lists=cta.equals(0),
            write=write,
        )

    place(*refs, cta)


def _routing(expert_ids: jax.Array, valid: jax.Array | None) -> list[jax.Array]:
    """Returns the operands of the counting: ids [T * k] and, unless all are valid, int32 [T]."""
    flat = [expert_ids.reshape(-1)]
    return flat if valid is None else [*flat, valid.astype(jnp.int32)]


def _vectors(*sizes: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]


def _buffers(*sizes: int) -> list[Any]:
    return [plgpu.SMEM((size,), jnp.int32) for size in sizes]


def _segments(
    places: jax.Array, starts: jax.Array, counts: jax.Array, tile_ends: jax.Array
) -> Segments:
    return Segments(places=places, starts=starts, counts=counts, tile_ends=tile_ends)


def combine(
    rows: Float[Array, "rows D"],
    weights: Float32[Array, "T k"],
    where: Segments,
    *,
    shared_row: int | None,
    out_dtype: DTypeLike,
    interpret: Any = None,
) -> Float[Array, "T D"]:
    """Returns the sum of weight * row over the pairs that have a row, in `out_dtype`.

    With a shared expert, token t's row of it is at `shared_row` + t; it is added with weight 1.
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
            # A pair without a row has read row 0, which may hold NaN: select, do not multiply.
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
