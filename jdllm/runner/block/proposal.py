"""From hidden states to a `Proposal`: vocabulary statistics, penalty, draws.

For greedy rows no logits are stored: the fused unembedding streams the vocabulary. Logits are
computed only for rows that sample, one row after the other, so that greedy batches pay nothing.
The vocabulary is streamed only for positions that can still change.

Letters: B rows, T tokens of a block, Q = B * T positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

import pallas_kernels
from jdllm.decoding.block import interface
from jdllm.layers import unembedding
from jdllm.runner.block import edit_tokens, sampling

# Hidden states that one pass over the vocabulary takes on a GPU. Up to this number the time of a
# pass is nearly the same, so that selecting the wanted ones would cost more than it saves.
ROWS_OF_A_PASS = 256


def previous_tokens(tokens: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns the token left of each position within the block (position 0: its own)."""
    return jnp.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)


def propose(
    hidden: Float[Array, "B T D"],
    lm_head: unembedding.LMHead,
    block: interface.BlockState,
    positions: Int32[Array, "B T"],
    step: Int32[Array, " B"],
    rows: sampling.SamplingRows,
    wanted: Bool[Array, "B T"],
    *,
    forbidden_ids: tuple[int, ...],
    special: edit_tokens.Special | None = None,
    implementation: str = "auto",
) -> interface.Proposal:
    """Returns the proposal for the `wanted` positions; others keep their token, at probability 0.

    The penalty lambda lowers the logit of the left neighbour's token within the block:
    position 0 has no penalty (SGLang 0.5.23, joint_threshold.py). With `special` tokens the
    proposal has `edits`.
    """
    B, T, D = hidden.shape
    left = previous_tokens(block.tokens)
    penalty = jnp.broadcast_to(block.params.penalty_lambda[:, None], (B, T)).at[:, 0].set(0.0)
    stats = _statistics(
        functools.partial(
            lm_head.stats,
            forbidden_ids=forbidden_ids if special is None else special.ids,
            implementation=implementation,
        ),
        hidden.reshape(B * T, D),
        left.reshape(-1),
        wanted.reshape(-1),
    )
    edits = None
    if special is not None:
        special_logits = lm_head.logits_of(hidden.reshape(B * T, D), special.ids)
        edits = special.proposal(stats, special_logits, (B, T))
        stats = special.with_edits(stats, special_logits)
    stats = pallas_kernels.penalize(stats, left.reshape(-1), penalty.reshape(-1))
    best = jnp.where(wanted, stats.best_id.reshape(B, T), block.tokens)
    best_prob = pallas_kernels.probability(stats.best_logit, stats.logsumexp).reshape(B, T)
    best_prob = jnp.where(wanted, best_prob, 0.0)
    best_logprob = (stats.best_logit - stats.logsumexp).reshape(B, T)
    samples = rows.temperature > 0

    draws = samples & jnp.any(wanted, axis=1)
    (drawing_rows,) = jnp.nonzero(draws, size=B, fill_value=0)

    def draw_one(i, drawn):
        tokens, relative, share = drawn
        r = drawing_rows[i]
        logits = lm_head.logits(hidden[r])
        logits = logits.at[jnp.arange(T), left[r]].add(-penalty[r])
        for token_id in forbidden_ids:
            logits = logits.at[:, token_id].set(sampling.NEVER)
        row = jax.tree.map(lambda leaf: leaf[r], rows)
        new_tokens, new_relative, new_share = sampling.draw_row(logits, positions[r], step[r], row)
        return (
            tokens.at[r].set(jnp.where(wanted[r], new_tokens, tokens[r])),
            relative.at[r].set(jnp.where(wanted[r], new_relative, relative[r])),
            share.at[r].set(jnp.where(wanted[r], new_share, share[r])),
        )

    # A loop with one turn for each row that draws. Unlike a conditional around a loop over all
    # rows, it stays on the device (`launch/executables.py` says what that takes).
    tokens, relative, draw_prob = jax.lax.fori_loop(
        0, jnp.sum(draws), draw_one, (best, jnp.ones((B, T), jnp.float32), best_prob)
    )
    return interface.Proposal(
        tokens=tokens,
        prob=jnp.minimum(best_prob, relative),
        best=best,
        best_prob=best_prob,
        is_drawn=samples,
        # `relative` is exp((z_drawn - z_best) / temperature), 1 where nothing is drawn.
        logprob=best_logprob + rows.temperature[:, None] * jnp.log(relative),
        best_logprob=best_logprob,
        draw_prob=draw_prob,
        entropy=stats.entropy.reshape(B, T),
        edits=edits,
    )


def _statistics(
    unembed_stats: Callable[..., pallas_kernels.UnembedStats],
    hidden: Float[Array, "Q D"],
    given_ids: Int32[Array, " Q"],
    wanted: Bool[Array, " Q"],
) -> pallas_kernels.UnembedStats:
    """Returns the statistics of the wanted positions, and arbitrary values for the others.

    The time of the GPU kernel depends on their number. The numbers of a position do not depend on
    its index, so gathering the wanted positions changes no bit.
    """
    Q = wanted.shape[0]
    count = jnp.sum(wanted, dtype=jnp.int32)
    if Q <= ROWS_OF_A_PASS:
        return unembed_stats(hidden, given_ids=given_ids, num_rows=jnp.where(count > 0, Q, 0))
    (chosen,) = jnp.nonzero(wanted, size=Q, fill_value=0)
    stats = unembed_stats(hidden[chosen], given_ids=given_ids[chosen], num_rows=count)
    place = jnp.cumsum(wanted) - 1
    return jax.tree.map(lambda field: field[place], stats)
