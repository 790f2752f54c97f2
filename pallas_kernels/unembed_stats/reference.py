"""Statistics of the logits by XLA, a chunk of the vocabulary at a time."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels.unembed_stats import partials
from pallas_kernels.unembed_stats.partials import LOWEST, PartialStats

# Bytes of the logits of one chunk. Up to 512 tokens of a 157k vocabulary take one chunk: slicing
# copies the weights, which costs more memory and time than the logits (H200, 256 tokens: 0.9 ms in
# chunks, 0.5 ms in one).
_CHUNK_BYTES = 384 * 2**20


def partial_stats(
    x: Float[Array, "T D"],
    w: Float[Array, "V D"],
    rows: Mapping[str, Num[Array, " T"]],
    forbidden_ids: tuple[int, ...],
    chunk_size: int | None,
    first_id: Int32[Array, ""] | None = None,
) -> PartialStats:
    """Returns the statistics of x @ w.T, as the kernel of the same name does.

    The rows of `w` have the ids from `first_id` on, by default from 0.
    """
    T, V = x.shape[0], w.shape[0]
    size = min(chunk_size or _default_chunk(T, V), V)

    def statistics(
        chunk: jax.Array, start: jax.Array | int, first_new: jax.Array | int
    ) -> PartialStats:
        ids = start + jnp.arange(chunk.shape[0], dtype=jnp.int32)
        fresh = ids >= first_new
        if first_id is not None:
            ids += first_id
        allowed = fresh & ~_is_any_of(ids, forbidden_ids)
        logits = jnp.einsum("td,vd->tv", x, chunk, preferred_element_type=jnp.float32)
        return _chunk_statistics(logits, ids, fresh, allowed, allowed, rows)

    def step(state: PartialStats, index: jax.Array) -> tuple[PartialStats, None]:
        # The last chunk starts early and masks the ids already seen: padding w would copy it.
        start = jnp.minimum(index * size, V - size)
        chunk = lax.dynamic_slice_in_dim(w, start, size)
        return partials.merge(state, statistics(chunk, start, index * size)), None

    if size == V:
        return statistics(w, 0, 0)
    chunks = jnp.arange(-(-V // size), dtype=jnp.int32)
    start = partials.empty((T,), draws="draw_first" in rows)
    return lax.scan(step, start, chunks)[0]


def statistics_of(
    logits: Float[Array, "T V"],
    rows: Mapping[str, Num[Array, " T"]],
    forbidden_ids: tuple[int, ...],
    lowest_drawn: Float[Array, " T"] | None,
    first_id: Int32[Array, ""] | None = None,
) -> PartialStats:
    """Returns the statistics of given logits; ids below `lowest_drawn` are not drawn.

    The columns have the ids from `first_id` on, by default from 0.
    """
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    if first_id is not None:
        ids += first_id
    every, allowed = jnp.ones(ids.shape, bool), ~_is_any_of(ids, forbidden_ids)
    drawable = allowed if lowest_drawn is None else allowed & (logits >= lowest_drawn[:, None])
    return _chunk_statistics(logits, ids, every, allowed, drawable, rows)


def _chunk_statistics(logits, ids, fresh, allowed, drawable, rows) -> PartialStats:
    T, size = logits.shape
    given_logit = jnp.zeros(T, jnp.float32)
    if "given_ids" in rows:
        here = fresh & (ids == rows["given_ids"][:, None])  # [T, size]
        given_logit = jnp.where(here, logits, 0.0).sum(axis=1)
    high = jnp.where(fresh, logits, LOWEST).max(axis=1)
    below = jnp.where(fresh, logits - high[:, None], LOWEST)
    weight = jnp.exp(below)
    candidates = jnp.where(allowed, logits, LOWEST)
    best, best_logit = _first_highest(candidates)
    others = jnp.where(jnp.arange(size) == best[:, None], LOWEST, candidates)
    second, second_logit = _first_highest(others)
    drawn_score = drawn_id = drawn_logit = None
    if "draw_first" in rows:
        counter = partials.draw_counter(rows["draw_first"][:, None], ids)
        scores = candidates * rows["inverse_temperature"][:, None]
        scores += partials.noise(counter, rows["draw_second"][:, None])
        drawn, drawn_score = _first_highest(jnp.where(drawable, scores, LOWEST))
        drawn_id = ids[drawn]
        drawn_logit = jnp.take_along_axis(logits, drawn[:, None], axis=1)[:, 0]
    return PartialStats(
        high=high,
        total=weight.sum(axis=1),
        moment=(weight * below).sum(axis=1),
        best_id=ids[best],
        best_logit=best_logit,
        second_id=ids[second],
        second_logit=second_logit,
        given_logit=given_logit,
        drawn_score=drawn_score,
        drawn_id=drawn_id,
        drawn_logit=drawn_logit,
    )


def _first_highest(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (position, value) of each row's maximum; of equal values, the first position."""
    position = jnp.argmax(values, axis=1).astype(jnp.int32)
    return position, jnp.take_along_axis(values, position[:, None], axis=1)[:, 0]


def _default_chunk(T: int, V: int) -> int:
    chunks = -(-4 * T * V // _CHUNK_BYTES)
    return -(-V // chunks)


def _is_any_of(ids: jax.Array, few: tuple[int, ...]) -> jax.Array:
    found = jnp.zeros(ids.shape, bool)
    for one in few:
        found |= ids == one
    return found
