"""Draws tokens for rows with a temperature: temperature, top-k, top-p, per-request seeds.

A draw depends on the request's seed, the absolute position and the step alone, never
on the row or its neighbours: key = fold_in(fold_in(seed, position), step). Only rows
that sample pay: their logits are formed one row at a time, [T, V] float32.

The confidence that gates a drawn token is min(p_best, exp((z_drawn - z_best) / T)): how
likely it is relative to the best, capped by the untempered probability of the best (the
rule of upstream SGLang, `dllm/algorithm/sampling.py`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

NEVER = -1e30  # finite, so that differences of masked logits stay numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Per-row sampling options: temperature 0 is greedy, top_k 0 and top_p 1 keep all."""

    temperature: jax.Array  # [B] float32
    top_p: jax.Array  # [B] float32
    top_k: jax.Array  # [B] int32
    seed: jax.Array  # [B, 2] uint32


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns [T, V] logits with everything outside top-k, then top-p, at `NEVER`.

    top-p keeps the most probable tokens up to where their mass reaches `top_p`, at least one.
    Of equal logits at an edge all are kept.

    Edges are found bit by bit, 32 passes over the logits each, and none where a filter is
    off. Sorting needs more passes on a GPU, and cannot run within a loop on the device.
    """
    V = logits.shape[-1]
    keys = _ordered_bits(logits)
    limits_k, limits_p = (top_k > 0) & (top_k < V), top_p < 1.0
    edge = _edge(keys, jnp.ones_like(logits), top_k.astype(jnp.float32), limits_k)
    kept = jnp.where(keys >= edge, logits, NEVER)
    edge = jnp.maximum(edge, _edge(keys, jax.nn.softmax(kept, axis=-1), top_p, limits_p))
    return jnp.where(keys >= edge, logits, NEVER)


def _edge(keys: jax.Array, weights: jax.Array, target: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns [T, 1] the highest key that, with all above it, weighs `target`; 0 if not wanted."""

    def one_bit(i: jax.Array, edge: jax.Array) -> jax.Array:
        higher = edge | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= higher, weights, 0.0), axis=-1, keepdims=True)
        # A target of 0 (a top_p that float32 cannot hold) still keeps the best.
        return jnp.where((weight >= target) & (weight > 0), higher, edge)

    start = jnp.zeros((keys.shape[0], 1), jnp.uint32)
    return jax.lax.fori_loop(0, jnp.where(wanted, 32, 0), one_bit, start)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Returns uint32 that compare as the float32 they come from; adding 0 makes one zero of two."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def draw_row(
    logits: jax.Array, positions: jax.Array, step: jax.Array, row: SamplingRows
) -> tuple[jax.Array, jax.Array]:
    """Returns ([T] drawn ids, [T] exp((z_drawn - z_best) / T)) of one row.

    `logits` [T, V] float32 hold forbidden ids at `NEVER`; `row` has scalar fields.
    """
    temperature = jnp.maximum(row.temperature, 1e-6)
    scaled = jnp.where(logits <= NEVER / 2, NEVER, logits / temperature)
    allowed = filter_logits(scaled, row.top_k, row.top_p)
    key = jax.random.wrap_key_data(row.seed)

    def noise(position: jax.Array) -> jax.Array:
        return jax.random.gumbel(
            jax.random.fold_in(jax.random.fold_in(key, position), step), logits.shape[-1:]
        )

    drawn = jnp.argmax(allowed + jax.vmap(noise)(positions), axis=-1).astype(jnp.int32)
    taken = jnp.take_along_axis(scaled, drawn[:, None], axis=-1)[:, 0]
    return drawn, jnp.exp(taken - jnp.max(scaled, axis=-1))
