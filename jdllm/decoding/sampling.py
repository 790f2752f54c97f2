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

    Of equal logits at the edge all are kept by top-k; top-p keeps the smallest set of
    most probable tokens whose mass reaches `top_p`, at least one.
    """
    V = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)  # [T, V] descending
    k = jnp.where((top_k <= 0) | (top_k > V), V, top_k)
    kth = jnp.take_along_axis(ordered, jnp.full((logits.shape[0], 1), k - 1), axis=-1)
    kept = jnp.where(ordered >= kth, ordered, NEVER)
    prob = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(prob, axis=-1) - prob  # mass of strictly better tokens
    last = jnp.sum((before < top_p) & (kept > NEVER / 2), axis=-1, keepdims=True) - 1
    edge = jnp.take_along_axis(kept, jnp.maximum(last, 0), axis=-1)
    edge = jnp.where(top_p >= 1.0, kth, jnp.maximum(edge, kth))
    return jnp.where(logits >= edge, logits, NEVER)


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
