"""Draws tokens for rows with a temperature: temperature, top-k, top-p, per-request seeds.

A draw depends only on the request's seed, the absolute position and the step, never
on the row or its neighbours: key = fold_in(fold_in(seed, position), step). Only rows
that sample have a cost: their logits, [T, V] float32, are computed one row at a time.

The confidence of a drawn token, which decides whether it is written, is
min(p_best, exp((z_drawn - z_best) / temperature)): its probability relative to the best token,
at most the untempered probability of the best (the rule of upstream SGLang,
`dllm/algorithm/sampling.py`).

Letters: B rows, T tokens of a block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

NEVER = -1e30  # finite, so that differences of masked logits stay numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling options of each row: temperature 0 is greedy, top_k 0 and top_p 1 keep all.

    The arrays are numpy's on the host and traced in the launch.
    """

    temperature: Float32[Any, " B"]
    top_p: Float32[Any, " B"]
    top_k: Int32[Any, " B"]
    seed: UInt32[Any, "B 2"]


def filter_logits(
    logits: Float32[Array, "T V"], top_k: Int32[Array, ""], top_p: Float32[Array, ""]
) -> Float32[Array, "T V"]:
    """Returns the logits with everything outside top-k, then top-p, set to `NEVER`.

    top-p keeps the most probable tokens until their mass reaches `top_p`, at least one token.
    Both filters keep all tokens whose logit equals that of the last token kept.

    A search bit by bit finds the lowest logit to keep, with 32 passes over the logits for each
    filter, and no pass where a filter is off. Sorting needs more passes on a GPU, and cannot run
    within a loop on the device.
    """
    V = logits.shape[-1]
    keys = _ordered_bits(logits)
    has_top_k, has_top_p = (top_k > 0) & (top_k < V), top_p < 1.0
    edge = _edge(keys, jnp.ones_like(logits), top_k.astype(jnp.float32), has_top_k)
    kept = jnp.where(keys >= edge, logits, NEVER)
    edge = jnp.maximum(edge, _edge(keys, jax.nn.softmax(kept, axis=-1), top_p, has_top_p))
    return jnp.where(keys >= edge, logits, NEVER)


def _edge(
    keys: UInt32[Array, "T V"],
    weights: Float32[Array, "T V"],
    target: Float32[Array, ""],
    wanted: Bool[Array, ""],
) -> UInt32[Array, "T 1"]:
    """Returns the highest key for which the weights of all keys from it on reach `target`.

    Returns 0 where it is not `wanted`.
    """

    def one_bit(i: Int32[Array, ""], edge: UInt32[Array, "T 1"]) -> UInt32[Array, "T 1"]:
        higher = edge | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= higher, weights, 0.0), axis=-1, keepdims=True)
        # A target of 0 (a top_p too small for float32) still keeps the best token.
        return jnp.where((weight >= target) & (weight > 0), higher, edge)

    start = jnp.zeros((keys.shape[0], 1), jnp.uint32)
    return jax.lax.fori_loop(0, jnp.where(wanted, 32, 0), one_bit, start)


def _ordered_bits(x: Float32[Array, "T V"]) -> UInt32[Array, "T V"]:
    """Returns integers in the same order as the floats; adding 0 turns -0.0 into 0.0."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def draw_row(
    logits: Float32[Array, "T V"],
    positions: Int32[Array, " T"],
    step: Int32[Array, ""],
    row: SamplingRows,
    min_p: Float32[Array, ""] | None = None,
) -> tuple[Int32[Array, " T"], Float32[Array, " T"], Float32[Array, " T"]]:
    """Returns the drawn ids of one row, exp((z_drawn - z_best) / temperature), and their share.

    The share is the probability in the distribution that the id was drawn from. The logits of
    forbidden ids are `NEVER`; `row` has the fields of one row, without B. With `min_p`, no id is
    drawn whose tempered probability is less than `min_p` times the best one's.
    """
    temperature = jnp.maximum(row.temperature, 1e-6)
    scaled = jnp.where(logits <= NEVER / 2, NEVER, logits / temperature)
    allowed = filter_logits(scaled, row.top_k, row.top_p)
    if min_p is not None:
        lowest = jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(min_p)
        allowed = jnp.where(scaled >= lowest, allowed, NEVER)
    key = jax.random.wrap_key_data(row.seed)

    def noise(position: Int32[Array, ""]) -> Float32[Array, " V"]:
        return jax.random.gumbel(
            jax.random.fold_in(jax.random.fold_in(key, position), step), logits.shape[-1:]
        )

    drawn = jnp.argmax(allowed + jax.vmap(noise)(positions), axis=-1).astype(jnp.int32)
    taken = jnp.take_along_axis(scaled, drawn[:, None], axis=-1)[:, 0]
    share = jnp.exp(taken - jax.nn.logsumexp(allowed, axis=-1))
    return drawn, jnp.exp(taken - jnp.max(scaled, axis=-1)), share
