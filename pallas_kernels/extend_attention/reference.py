"""Attention over a paged K,V pool by XLA: what the op computes, on every device.

Queries are cut into tiles of one diffusion block; a tile belongs to one row. An online softmax runs
over chunks of pages. The row that needs most chunks sets their number, so the cost follows the
actual context. A tile that needs fewer chunks sees only masked keys in the rest: probabilities are
exactly 0 and the rescale factor is exactly 1, so a neighbour never changes a row's bits.

Shape letters: M pages of a row.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

Visibility = Literal["block_causal", "full", "causal"]


# Finite: with -inf, the rescale factor of a row without visible keys would be exp(nan).
_MASKED_SCORE = -1e30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiling:
    """Sizes of the XLA implementation; part of the compiled program, never of the batch."""

    chunk_tokens: int = 512
    group_bytes: int = 128 * 2**20  # gathered K,V and scores of one group of tiles


DEFAULT_TILING = AttentionTiling()


def tile_rows_and_visible_ends(
    cu_q_lens: Int32[Array, " R+1"],
    context_lens: Int32[Array, " R"],
    kv_lens: Int32[Array, " R"],
    *,
    tiles: int,
    block_size: int,
    visibility: Visibility,
    q_len: int | None = None,
) -> tuple[Int32[Array, " tiles"], Int32[Array, "tiles block"]]:
    """Returns each tile's row, and how many keys each query sees; `q_len` as for the op."""
    starts = jnp.arange(tiles, dtype=jnp.int32) * block_size
    if q_len is None:
        rows = jnp.searchsorted(cu_q_lens, starts, side="right").astype(jnp.int32) - 1
        rows = jnp.clip(rows, 0, kv_lens.shape[0] - 1)
    else:  # a search is a loop, which takes longer than short attention
        rows = starts // q_len
    first = context_lens[rows] + starts - cu_q_lens[rows]
    position = first[:, None] + jnp.arange(block_size, dtype=jnp.int32)  # [tiles, block]
    kv_len = kv_lens[rows][:, None]
    match visibility:
        case "block_causal":
            ends = jnp.minimum(kv_len, (position // block_size + 1) * block_size)
        case "causal":
            ends = jnp.minimum(kv_len, position + 1)
        case "full":
            ends = jnp.broadcast_to(kv_len, position.shape)
        case _:
            raise ValueError(f"unknown {visibility=}; use block_causal, full or causal")
    return rows, jnp.where((starts < cu_q_lens[-1])[:, None], ends, 0)


def visible_begins(
    cu_q_lens: Int32[Array, " R+1"],
    context_lens: Int32[Array, " R"],
    rows: Int32[Array, " tiles"],
    ends: Int32[Array, "tiles block"],
    *,
    visibility: Visibility,
    window: int,
) -> Int32[Array, "tiles block"]:
    """Returns the first key that each query sees, where a window ends what it sees to the left."""
    tiles, block = ends.shape
    first = context_lens[rows][:, None]
    if visibility == "causal":
        starts = jnp.arange(tiles, dtype=jnp.int32) * block - cu_q_lens[rows]
        first = first + starts[:, None] + jnp.arange(block, dtype=jnp.int32)
    return jnp.broadcast_to(jnp.maximum(first - (window - 1), 0), ends.shape)


def attend(
    q: Float[Array, "T N H"],
    kv_pool: Float[Array, "P 2 K Z H"],
    pages: Int32[Array, "tiles M"],
    ends: Int32[Array, "tiles block"],
    *,
    begins: Int32[Array, "tiles block"] | None = None,
    scale: float,
    tiling: AttentionTiling,
) -> Float[Array, "T N H"]:
    """Returns the attention of q to the pages of each tile's row.

    A query sees the keys from `begins` (default: the first one) up to `ends`, without that one.
    """
    T, N, H = q.shape
    K = kv_pool.shape[2]
    # Heads lead inside a tile and the G queries of a kv head are folded into its rows.
    q_tiles = q.reshape(*ends.shape, K, N // K, H).transpose(0, 2, 1, 3, 4)
    attend = functools.partial(_attend_tiles, kv_pool=kv_pool, scale=scale, tiling=tiling)
    bounds = (ends,) if begins is None else (ends, begins)
    group = _tiles_per_group(q_tiles, kv_pool, tiling)
    out = _map_groups(attend, (q_tiles, pages, *bounds), group)
    return out.transpose(0, 2, 1, 3, 4).reshape(T, N, H)


def _attend_tiles(q, pages, ends, begins=None, *, kv_pool, scale, tiling) -> jax.Array:
    """Returns the attention of tiles [tiles, K, block, G, H] to their rows' pages [tiles, M]."""
    num_pages, _, K, Z, H = kv_pool.shape
    tiles, _, block, G, _ = q.shape
    max_pages = pages.shape[1]
    chunk_pages = _chunk_pages(Z, max_pages, tiling)
    chunk = chunk_pages * Z
    heads = jnp.arange(K, dtype=jnp.int32)[:, None]
    last_end = ends.max(axis=1)  # [tiles]
    q = q.reshape(tiles, K, block * G, H)

    def read(ids: jax.Array, part: int) -> jax.Array:
        # The gather indexes the head too, so it writes the order that the matmul reads: no
        # transpose.
        found = kv_pool.at[ids[:, None, :], part, heads].get(mode="clip")  # [tiles, K, pages, Z, H]
        return found.reshape(tiles, K, chunk, H)

    def step(index, state):
        high, total, acc = state  # [tiles, K, block, G, 1] twice, [tiles, K, block * G, H]
        columns = jnp.minimum(index * chunk_pages + jnp.arange(chunk_pages), max_pages - 1)
        ids = jnp.clip(pages[:, columns], 0, num_pages - 1)
        key_position = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
        # [tiles, 1, block, 1, chunk]
        visible = (key_position < ends[:, :, None])[:, None, :, None, :]
        if begins is not None:
            visible &= (key_position >= begins[:, :, None])[:, None, :, None, :]
        live = (key_position < last_end[:, None])[:, None, :, None]  # [tiles, 1, chunk, 1]
        keys = read(ids, 0)
        values = jnp.where(live, read(ids, 1), 0)  # 0 * nan is nan: dead values must be 0

        scores = jnp.einsum("tkqh,tkch->tkqc", q, keys, preferred_element_type=jnp.float32)
        scores = scores.reshape(tiles, K, block, G, chunk) * scale
        scores = jnp.where(visible, scores, _MASKED_SCORE)
        new_high = jnp.maximum(high, scores.max(axis=-1, keepdims=True))
        # The select gives 0 to a query that has seen no key yet: its scores all equal its high.
        weights = jnp.where(visible, jnp.exp(scores - new_high), 0.0)
        rescale = jnp.exp(high - new_high)
        total = total * rescale + weights.sum(axis=-1, keepdims=True)
        weights = weights.reshape(tiles, K, block * G, chunk).astype(values.dtype)
        added = jnp.einsum("tkqc,tkch->tkqh", weights, values, preferred_element_type=jnp.float32)
        return new_high, total, acc * rescale.reshape(tiles, K, block * G, 1) + added

    high = jnp.full((tiles, K, block, G, 1), _MASKED_SCORE, jnp.float32)
    acc = jnp.zeros((tiles, K, block * G, H), jnp.float32)
    trips = (last_end.max() + chunk - 1) // chunk
    # A tile without work (padding) has no say in where the others begin.
    skipped = 0 if begins is None else jnp.where(ends > 0, begins, ends.max()).min() // chunk
    _, total, acc = lax.fori_loop(skipped, trips, step, (high, jnp.zeros_like(high), acc))
    acc = acc.reshape(tiles, K, block, G, H)
    # "== 0", not "> 0": a NaN must reach the logits, because there it ends the request.
    return jnp.where(total == 0, 0.0, acc / jnp.where(total == 0, 1.0, total)).astype(q.dtype)


def _map_groups(function, arguments, group: int):
    """Applies `function` to one group of tiles after another: memory holds one group's K,V.

    The last tile fills up the last group: a group of another shape could round differently. Tiles
    are gathered, not sliced: XLA for GPUs copies slices on its own account, and a loop with such
    copies is no CUDA graph, nor is any loop around it.
    """
    tiles = arguments[0].shape[0]
    if group >= tiles:
        return function(*arguments)

    def of_group(first):
        ids = jnp.minimum(first + jnp.arange(group, dtype=jnp.int32), tiles - 1)
        return function(*(array[ids] for array in arguments))

    out = lax.map(of_group, jnp.arange(0, tiles, group, dtype=jnp.int32))
    return out.reshape(-1, *out.shape[2:])[:tiles]


def _chunk_pages(page_size: int, max_pages: int, tiling: AttentionTiling) -> int:
    return max(1, min(tiling.chunk_tokens // page_size, max_pages))


def _tiles_per_group(q_tiles, kv_pool, tiling: AttentionTiling) -> int:
    tiles, K, block, G, H = q_tiles.shape
    Z = kv_pool.shape[3]
    chunk = max(Z, tiling.chunk_tokens)
    per_tile = K * chunk * (2 * H * kv_pool.dtype.itemsize + block * G * 4)
    groups = -(-tiles // max(1, tiling.group_bytes // per_tile))
    return -(-tiles // groups)
