"""What one work item of the paged attention kernel is: plan, work list, scalars, sum of splits.

An item is (query tile, heads, split): `tile_tokens` consecutive tokens of one row for some query
heads, against the keys of one split. `Plan` holds everything static about a launch. It is a
function of shapes and tile parameters alone, so a neighbour never changes a row's rounding. `Item`
holds what is read from the batch (row, positions, lengths): scalars that each warpgroup of the
kernel computes for itself.

Queries are folded: the rows of an item are (head, token), and each head has `tile_tokens`
consecutive rows. So a head's rows are one TMA box of q [T, N, H], and q needs no transposed copy.
Up to two warpgroups hold 64 rows each. If the rows of a kv head fill one warpgroup or less, an item
takes two kv heads and each warpgroup works on its own (`streams` = 2).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import device, dispatch, tiles
from pallas_kernels.hopper import limits

WARPGROUP_ROWS = 64
MAX_ROWS = 2 * WARPGROUP_ROWS
TUNED_HEAD_DIM = 128
MAX_HEAD_DIM = 256  # a thread of a warpgroup holds 64 * 256 / 128 sums, and has 232 registers
MAX_SPLITS = 32  # the combine holds one slice of every split in shared memory
# Finite: with -inf, the rescale factor of a row without visible keys would be exp(nan).
MASKED_SCORE = -1e30
WINDOW = 8  # a TMA of tiled shared memory starts at a multiple of 8 tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """Tile parameters, from the table of the device."""

    kv_tokens: int = 128  # keys of a step
    stages: int = 2  # steps of K and V in flight
    split_tokens: int = 0  # keys of a split; 0: a row is never split
    persistent: bool = True  # each multiprocessor has one CTA for many items; else one CTA an item
    ping_pong: bool = True  # the two warpgroups alternate between tensor cores and softmax
    max_rows: int = MAX_ROWS  # rows of an item: 128, or 64 where that leaves fewer SMs idle
    p_in_registers: bool = True  # False: in shared memory; the interpreter runs only this

    def __post_init__(self):
        if self.max_rows not in (WARPGROUP_ROWS, MAX_ROWS):
            raise ValueError(f"extend_attention: an item has up to 64 or 128 rows: {self}")


# Of heads wider than those of the device's table: what fits, since no such tile was measured yet.
WIDE_HEADS = AttentionTile(kv_tokens=64, stages=2, persistent=False)


class Piece(NamedTuple):
    """Consecutive rows of an item for one query head: one TMA box of q and of out."""

    head: int  # relative to the item's first query head
    token: int  # relative to the item's first token
    warpgroup: int
    row: int  # in the warpgroup
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything static about one launch."""

    tile: AttentionTile
    visibility: str
    block_size: int
    scale: float
    dtype: jnp.dtype
    tokens: int
    rows: int  # of the page table
    kv_heads: int
    group: int  # query heads of a kv head
    head_dim: int
    num_pages: int
    page: int
    pages_per_row: int
    q_len: int | None  # tokens of every row; None: rows of any length, through a work list
    window: int | None  # keys that a query sees at most, up to its own (see `visible_begin`)
    multiprocessors: int
    interpreted: bool

    @functools.cached_property
    def tile_tokens(self) -> int:
        """Tokens of a tile: at least those of a (mean) row, as a power of two from 8 on."""
        typical = self.q_len or -(-self.tokens // self.rows)
        return min(max(WINDOW, 1 << (typical - 1).bit_length()), self.tile.max_rows)

    @functools.cached_property
    def tile_heads(self) -> int:
        """Query heads of one kv head in an item: as many as fit."""
        fitting = self.tile.max_rows // self.tile_tokens
        return max(heads for heads in range(1, fitting + 1) if self.group % heads == 0)

    @functools.cached_property
    def streams(self) -> int:
        """kv heads of an item; K and V of two wide ones would not fit the shared memory."""
        if self.head_dim > TUNED_HEAD_DIM:
            return 1
        fits = self.tile_heads == self.group and self.group * self.tile_tokens <= WARPGROUP_ROWS
        return 2 if fits and self.kv_heads % 2 == 0 and self.tile.max_rows == MAX_ROWS else 1

    @functools.cached_property
    def warpgroups(self) -> int:
        return self.streams * -(-self.tile_heads * self.tile_tokens // WARPGROUP_ROWS)

    @functools.cached_property
    def head_items(self) -> int:
        return self.kv_heads * self.group // (self.streams * self.tile_heads)

    @functools.cached_property
    def padded_tokens(self) -> int:
        return max(-(-self.tokens // WINDOW) * WINDOW, self.tile_tokens)

    @functools.cached_property
    def store_tokens(self) -> int:
        """How many tokens are stored at once where a tile also holds other rows' tokens."""
        return math.gcd(WINDOW, self.q_len or self.block_size)

    @functools.cached_property
    def q_tiles(self) -> int:
        """Tiles of a row if q_len is known; a row may begin inside a window."""
        assert self.q_len is not None, "rows of any length have a work list"
        slack = WINDOW - math.gcd(WINDOW, self.q_len)
        return -(-(self.q_len + slack) // self.tile_tokens)

    @functools.cached_property
    def num_tiles(self) -> int:
        if self.q_len is not None:
            return self.rows * self.q_tiles
        # A segment of n tokens takes at most n / tile_tokens + 1 tiles, or + 2 if it begins inside
        # a window. The tokens past the last row are one more segment.
        slack = 1 if self.block_size % WINDOW == 0 else 2
        return self.padded_tokens // self.tile_tokens + slack * (self.rows + 1)

    @functools.cached_property
    def most_keys(self) -> int:
        """Keys of the steps of an item: those of the longest row, or fewer with a window."""
        width = self.pages_per_row * self.page
        if self.window is None or self.q_len is None:
            return width
        return min(width, self.window + self.q_len + self.tile.kv_tokens)

    @functools.cached_property
    def split_tokens(self) -> int:
        """Keys of a split: the tile's number, or more if that gives too many splits."""
        step = self.tile.kv_tokens
        if not self.tile.split_tokens:
            return self.most_keys
        return max(self.tile.split_tokens, -(-self.most_keys // (MAX_SPLITS * step)) * step)

    @functools.cached_property
    def num_splits(self) -> int:
        return -(-self.most_keys // self.split_tokens)

    @functools.cached_property
    def num_items(self) -> int:
        return self.num_tiles * self.head_items * self.num_splits

    @functools.cached_property
    def ctas(self) -> int:
        return min(self.multiprocessors, self.num_items) if self.tile.persistent else self.num_items

    @functools.cached_property
    def rounds(self) -> int:
        return -(-self.num_items // self.ctas)

    @functools.cached_property
    def q_buffers(self) -> int:
        return min(2, self.rounds)

    @functools.cached_property
    def num_lists(self) -> int:
        """How many arrays define the items: a work list, or lengths and maybe an order."""
        return 1 if self.q_len is None else 2 + (self.rounds > 1)

    @functools.cached_property
    def head_chunk(self) -> int:
        """Neighbouring heads of a tile in the work list: as many as fit with their K,V in L2."""
        limit = 4 * self.group // self.tile_heads
        return max(n for n in range(1, limit + 1) if self.head_items % n == 0)

    @functools.cached_property
    def always_whole(self) -> bool:
        return self.q_len is not None and self.q_len % self.tile_tokens == 0

    @functools.cached_property
    def uses_turns(self) -> bool:
        return self.tile.ping_pong and self.warpgroups == 2

    @functools.cached_property
    def box_tokens(self) -> int:
        """Keys of one TMA box: a page or a part of it."""
        return min(self.tile.kv_tokens, self.page)

    @functools.cached_property
    def boxes(self) -> int:
        """TMA boxes of K (or V) in a step."""
        return self.streams * self.tile.kv_tokens // self.box_tokens

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        size = min(self.tile_tokens, WARPGROUP_ROWS)
        found = []
        for stream in range(self.streams):
            for head in range(self.tile_heads):
                for token in range(0, self.tile_tokens, size):
                    row = stream * WARPGROUP_ROWS + head * self.tile_tokens + token
                    found.append(
                        Piece(
                            head=stream * self.tile_heads + head,
                            token=token,
                            warpgroup=row // WARPGROUP_ROWS,
                            row=row % WARPGROUP_ROWS,
                            tokens=size,
                        )
                    )
        return tuple(found)

    @functools.cached_property
    def smem_bytes(self) -> int:
        """Shared memory of the kernel without its barriers."""
        rows, D, itemsize = self.warpgroups * WARPGROUP_ROWS, self.head_dim, self.dtype.itemsize
        elements = self.q_buffers * rows * D
        elements += 2 * self.tile.stages * self.streams * self.tile.kv_tokens * D
        if not self.tile.p_in_registers:
            elements += rows * self.tile.kv_tokens
        if self.num_splits == 1 and self.store_tokens < WINDOW:
            elements += rows * D
        return elements * itemsize + (rows * 4 if self.num_splits > 1 else 0)


def why_not(
    *, dtype: jnp.dtype, head_dim: int, page_size: int, block_size: int, q_heads: int, kv_heads: int
) -> str | None:
    """Returns why the kernel cannot serve this shape, or None."""
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if head_dim > MAX_HEAD_DIM:
        sums = WARPGROUP_ROWS * head_dim // 128
        return f"needs head_dim up to {MAX_HEAD_DIM}: with {head_dim} a thread holds {sums} sums"
    if head_dim not in (64, 128, 256):
        return f"needs head_dim 64, 128 or 256, this is {head_dim}"
    if page_size < 32 or page_size & (page_size - 1):
        return f"needs a page size that is a power of two from 32, this is {page_size}"
    if block_size < 4 or block_size & (block_size - 1):
        return f"needs a block size that is a power of two from 4, this is {block_size}"
    if head_dim > TUNED_HEAD_DIM and block_size < WINDOW:
        return f"heads of {head_dim} need a block size from {WINDOW}, this is {block_size}"
    if q_heads % kv_heads:
        return f"needs query heads that are a multiple of kv heads, these are {q_heads}, {kv_heads}"
    return None


def make_plan(
    q: Float[Array, "T N H"],
    kv_pool: Float[Array, "P 2 K Z H"],
    page_table: Int32[Array, "R pages_per_row"],
    *,
    visibility: str,
    block_size: int,
    scale: float,
    q_len: int | None = None,
    window: int | None = None,
    tile: AttentionTile | None = None,
    interpreted: bool = False,
) -> Plan:
    """Returns the plan of a launch; raises ValueError for shapes that cannot run."""
    T, N, H = q.shape
    num_pages, _, K, Z, _ = kv_pool.shape
    rows, pages_per_row = page_table.shape
    shapes = f"q {q.dtype}{q.shape}, kv_pool {kv_pool.shape}, {block_size=}, {q_len=}"
    reason = why_not(
        dtype=q.dtype, head_dim=H, page_size=Z, block_size=block_size, q_heads=N, kv_heads=K
    )
    if reason is not None:
        raise ValueError(f"extend_attention: mosaic_gpu {reason}: {shapes}")
    if q_len is not None and (q_len < 1 or q_len % block_size or rows * q_len != T):
        raise ValueError(
            f"extend_attention: q_len must be whole blocks, and the tokens / {rows} rows: {shapes}"
        )
    if q_len is None and tile is not None and tile.split_tokens:
        raise ValueError(f"extend_attention: rows of unequal length cannot be split: {tile}")
    plan = Plan(
        tile=tile or AttentionTile(), visibility=visibility, block_size=block_size, scale=scale,
        dtype=jnp.dtype(q.dtype), tokens=T, rows=rows, kv_heads=K, group=N // K, head_dim=H,
        num_pages=num_pages, page=Z, pages_per_row=pages_per_row, q_len=q_len, window=window,
        multiprocessors=device.local_device().num_multiprocessors, interpreted=interpreted,
    )  # fmt: skip
    if tile is None and H > TUNED_HEAD_DIM:
        plan = dataclasses.replace(plan, tile=WIDE_HEADS)
    elif tile is None:
        found = tiles.lookup(
            "extend_attention",
            ragged=int(q_len is None),
            streams=plan.streams,
            items=plan.num_tiles * plan.head_items,
            tokens=T,
            rows=rows,
            width=plan.most_keys,
        )
        plan = dataclasses.replace(plan, tile=AttentionTile(**found))
    if interpreted:
        plan = dataclasses.replace(plan, tile=dataclasses.replace(plan.tile, p_in_registers=False))
    if plan.smem_bytes > limits.SHARED_MEMORY:
        raise ValueError(
            f"extend_attention: {plan.smem_bytes} bytes of shared memory, "
            f"{limits.SHARED_MEMORY} exist: {plan.tile}, {shapes}"
        )
    return plan


def lists(
    plan: Plan,
    cu_q_lens: Int32[Array, " R+1"],
    context_lens: Int32[Array, " R"],
    kv_lens: Int32[Array, " R"],
) -> tuple[Int32[Array, "..."], ...]:
    """Returns the arrays from which `item_at` reads an item.

    They are pure functions of the batch, so XLA keeps one copy for all layers of a forward.
    """
    if plan.q_len is None:
        return (_tiles(plan, cu_q_lens, context_lens, kv_lens),)
    if plan.rounds == 1:
        return (context_lens, kv_lens)
    # Longest rows first: so the CTAs get nearly equal work. The order changes no row's arithmetic.
    return (context_lens, kv_lens, jnp.argsort(-kv_lens, stable=True).astype(jnp.int32))


def _tiles(
    plan: Plan, cu_q_lens: jax.Array, context_lens: jax.Array, kv_lens: jax.Array
) -> jax.Array:
    """Returns the tiles of rows of any length: int32 [num_tiles, 7].

    Columns: row, first token of the tile's window, first token of the row in the window, end of the
    row, position of the row's first token there, kv_len, context. The tokens past the last row
    count as a row of kv_len 0, which writes zeros. A tile past the end has first >= end and is
    skipped.
    """
    rows, size = plan.rows, plan.tile_tokens
    ends = jnp.concatenate([cu_q_lens[1:], jnp.full((1,), plan.tokens, jnp.int32)])
    windows = cu_q_lens // WINDOW * WINDOW
    counts = jnp.where(ends > cu_q_lens, (ends - windows + size - 1) // size, 0)
    total = jnp.cumsum(counts)
    index = jnp.arange(plan.num_tiles, dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= total, axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, rows)
    window = windows[row] + (index - (total - counts)[row]) * size
    first = jnp.maximum(cu_q_lens[row], window)
    zero = jnp.zeros((1,), jnp.int32)
    context = jnp.concatenate([context_lens, zero])[row]
    position = context + first - cu_q_lens[row]
    kv_len = jnp.concatenate([kv_lens, zero])[row]
    columns = [jnp.minimum(row, rows - 1), window, first, ends[row], position, kv_len, context]
    return jnp.stack(columns, axis=1)


class Item(NamedTuple):
    """Scalars of one work item; a step is kv_tokens keys."""

    row: jax.Array
    tile: jax.Array
    head: jax.Array  # in range(head_items)
    split: jax.Array
    window: jax.Array  # first token of the window
    start: jax.Array  # first token of the row in the window
    segment_end: jax.Array
    position: jax.Array  # of the token `start`
    kv_len: jax.Array
    context: jax.Array  # tokens of the row before those in flight
    keys: jax.Array  # from the first step of all splits to the last key that the tile sees
    low: jax.Array  # first step of the split
    inner: jax.Array  # first step that is in the windows of all of the tile's tokens
    whole: jax.Array  # first step with keys that some token does not see yet
    high: jax.Array  # end of the steps
    active: jax.Array


def visible_end(plan: Plan, position: jax.Array, kv_len: jax.Array) -> jax.Array:
    """Returns how many keys the query at `position` sees."""
    match plan.visibility:
        case "block_causal":
            return jnp.minimum(kv_len, (position | (plan.block_size - 1)) + 1)
        case "causal":
            return jnp.minimum(kv_len, position + 1)
        case "full":
            return kv_len
    raise ValueError(f"unknown visibility={plan.visibility!r}; use block_causal, full or causal")


def visible_begin(plan: Plan, position: jax.Array, context: jax.Array) -> jax.Array:
    """Returns the first key that the query at `position` sees; `context` is that of its row.

    A causal query has a window of its own. With full visibility the window is that of the first
    token in flight, for all of them.
    """
    if plan.window is None:
        return jnp.zeros_like(position)
    last = position if plan.visibility == "causal" else jnp.broadcast_to(context, position.shape)
    return jnp.maximum(last - (plan.window - 1), 0)


def item_at(plan: Plan, arrays: Sequence[Any], index: jax.Array) -> Item:
    """Returns item `index`; `arrays` are refs to the arrays that `lists` returns.

    Items of one row and kv head are neighbours, so they share K,V in L2. With a work list, the
    tiles of a few heads come in reverse order, because the late tiles of a row are the longest.
    """
    i32 = jnp.int32
    step, size = plan.tile.kv_tokens, plan.tile_tokens
    in_range = index < plan.num_items
    rest, split = _divmod(jnp.minimum(index, plan.num_items - 1), plan.num_splits)
    if plan.q_len is None:
        chunk, rest = _divmod(rest, plan.num_tiles * plan.head_chunk)
        tile, head = _divmod(rest, plan.head_chunk)
        tile, head = plan.num_tiles - 1 - tile, head + chunk * plan.head_chunk
        (tiles,) = arrays
        row, window, start, segment_end, position, kv_len, context = (
            tiles[tile, i] for i in range(7)
        )
    else:
        rest, q_tile = _divmod(rest, plan.q_tiles)
        row, head = _divmod(rest, plan.head_items)
        context_lens, kv_lens, *order = arrays
        if order:
            row = order[0][row]
        tile = row * plan.q_tiles + q_tile
        segment_start = row * plan.q_len
        window = segment_start
        if plan.q_len % WINDOW:
            window = lax.div(segment_start, i32(WINDOW)) * WINDOW
        window = window + q_tile * size
        start = jnp.maximum(segment_start, window)
        segment_end = segment_start + plan.q_len
        context = context_lens[row]
        position = context + start - segment_start
        kv_len = kv_lens[row]
    last = position + jnp.minimum(window + size, segment_end) - 1 - start  # its position
    visible = visible_end(plan, last, kv_len)
    high = lax.div(visible + (step - 1), i32(step))
    steps_a_split = plan.split_tokens // step if plan.num_splits > 1 else 0
    first = 0
    if plan.window is not None:
        first = lax.div(visible_begin(plan, position, context), i32(step))
    low = first + split * steps_a_split
    active = in_range & (start < segment_end)
    if plan.num_splits > 1:
        high = jnp.minimum(high, low + steps_a_split)
        active &= high > low
    high = jnp.where(active, jnp.maximum(high, low), low)
    whole = jnp.clip(lax.div(visible_end(plan, position, kv_len), i32(step)), low, high)
    inner = low
    if plan.window is not None:
        begin = visible_begin(plan, last, context)
        inner = jnp.clip(lax.div(begin + (step - 1), i32(step)), low, whole)
    return Item(
        row=row, tile=tile, head=head, split=split, window=window, start=start,
        segment_end=segment_end, position=position, kv_len=kv_len, context=context,
        keys=visible - first * step, low=low, inner=inner, whole=whole, high=high, active=active,
    )  # fmt: skip


def _divmod(value: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(value, jnp.int32(divisor)), lax.rem(value, jnp.int32(divisor))
