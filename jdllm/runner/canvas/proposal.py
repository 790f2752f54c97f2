"""From hidden states of packed windows to a `CanvasProposal`: the vocabulary statistics.

The vocabulary is streamed for the wanted positions alone, a fixed number of them a pass, so
forwards of all sizes of a launch share one compiled shape of the op (lowering its kernel takes
seconds). Rows that sample have passes of their own, whose draws come from a counter of seed,
position and step: they change no bit of the others'.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from jdllm.decoding.canvas import interface as canvas
from jdllm.runner import config as config_lib
from jdllm.runner.canvas import inputs as inputs_lib
from jdllm.runner.canvas import packing as packing_lib
from jdllm.runner.canvas import state as state_lib
from jdllm.scheduler.rows import canvas as canvas_rows

# Positions of a pass: of one row, of several. A pass reads the whole LM head, which takes as long
# as multiplying some 200 positions by it.
POSITIONS_OF_A_PASS = (128, 256)
# Tokens, logprob, entropy and margin travel through the passes as words of one array, which takes
# one kernel to begin and one to fill.
_FIELDS = (jnp.int32, jnp.float32, jnp.float32, jnp.float32)


def positions_of_a_pass(rows: int, most: int) -> int:
    """Returns how many positions a pass takes, in launches of up to `most` packed tokens."""
    return min(POSITIONS_OF_A_PASS[rows > 1], canvas_rows.packed_len(most))


def propose(
    config: config_lib.StepConfig,
    inputs: inputs_lib.CanvasInputs,
    lm_head: jax.Array,
    state: state_lib.CanvasState,
    packing: packing_lib.Packing,
    hidden: jax.Array,  # [T, D]
    *,
    chunk: int,
) -> tuple[canvas.CanvasProposal, jax.Array]:
    """Returns the proposal for the wanted positions, and [R]: a row's statistics are NaN.

    `chunk`: `positions_of_a_pass`.
    """
    params, window = inputs.params, state.window
    samples = params.temperature > 0
    tempers, scale = jnp.zeros_like(samples), None
    for i, algorithm in enumerate(state_lib.algorithms(config)):
        if algorithm.tempers:
            tempers |= (inputs.algorithm == i) & samples
            scale = 1.0 / jnp.where(tempers, params.temperature, 1.0)
    draws = _Draws(
        temperature=jnp.where(tempers, 1.0, params.temperature), seed=params.seed, step=state.step
    )
    sources = _Sources(hidden=hidden, edge=state.edge, packing=packing, low=window.low, scale=scale)
    take = functools.partial(_statistics, config, lm_head, sources, chunk=chunk)
    # Rows that sample have passes of their own, so that they change no bit of the others'.
    of_kind = jnp.stack([window.wanted & ~samples[:, None], window.wanted & samples[:, None]])
    greedy, drawn = jnp.cumsum(of_kind.reshape(2, -1), axis=1, dtype=jnp.int32)
    found = take(greedy, jnp.zeros((len(_FIELDS), *window.wanted.shape), jnp.int32), None)
    found = take(drawn, found, draws)
    tokens, logprob, entropy, margin = _from_words(found)
    is_wanted = window.wanted
    proposal = canvas.CanvasProposal(
        tokens=jnp.where(is_wanted, tokens, state.tokens),
        prob=jnp.where(is_wanted, jnp.exp(logprob), 0.0),
        logprob=jnp.where(is_wanted, logprob, 0.0),
        entropy=jnp.where(is_wanted, entropy, jnp.inf),
        margin=jnp.where(is_wanted, margin, 0.0),
    )
    return proposal, jnp.any(is_wanted & jnp.isnan(logprob), axis=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """The hidden states that positions are predicted from, and what the rows' are scaled by."""

    hidden: jax.Array  # [T, D]
    edge: jax.Array  # [R, D] where logits are shifted, else [R, 0]
    packing: packing_lib.Packing
    low: jax.Array  # [R]
    scale: jax.Array | None  # [R] float32; none where no algorithm tempers

    def of(self, row: jax.Array, position: jax.Array) -> jax.Array:
        """Returns [chunk, D] the scaled states for `position` of `row`, [chunk] each."""
        is_shifted = self.edge.shape[1] > 0
        offset = position - is_shifted - self.low[row]
        token = jnp.clip(self.packing.cu_q_lens[row] + offset, 0, self.hidden.shape[0] - 1)
        x = self.hidden[token]
        if is_shifted:
            x = jnp.where(offset[:, None] < 0, self.edge[row].astype(x.dtype), x)
        if self.scale is None:
            return x
        return (x.astype(jnp.float32) * self.scale[row, None]).astype(x.dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """What a draw depends on beside the position: [R] each, but `seed` [R, 2]."""

    temperature: jax.Array
    seed: jax.Array
    step: jax.Array

    def options(self, row: jax.Array, position: jax.Array) -> dict[str, jax.Array]:
        """Returns what `unembed_stats` draws by: a key of seed, position and step for each."""

        def key(seed: jax.Array, position: jax.Array, step: jax.Array) -> jax.Array:
            of_position = jax.random.fold_in(jax.random.wrap_key_data(seed), position)
            return jax.random.key_data(jax.random.fold_in(of_position, step))

        keys = jax.vmap(key)(self.seed[row], position, self.step[row])  # uint32 [chunk, 2]
        return {"draw_keys": keys, "temperature": self.temperature[row]}


def _to_words(*fields: jax.Array) -> jax.Array:
    """Returns int32 [4, ...] of four arrays [...]."""
    return jnp.stack([jax.lax.bitcast_convert_type(field, jnp.int32) for field in fields])


def _from_words(words: jax.Array) -> list[jax.Array]:
    """Returns the four arrays."""
    return [
        jax.lax.bitcast_convert_type(word, dtype)
        for word, dtype in zip(words, _FIELDS, strict=True)
    ]


def _statistics(
    config: config_lib.StepConfig,
    lm_head: jax.Array,  # [V, D]
    sources: _Sources,
    rank: jax.Array,  # [R * S]
    found: jax.Array,  # [4, R, S] words
    draws: _Draws | None,
    *,
    chunk: int,
) -> jax.Array:
    """Returns `found` with those of the positions of `rank`, `chunk` of them a pass.

    `rank`: how many of them there are up to and with a position, row after row.
    """
    R, S = found.shape[1:]
    total = rank[-1]
    # Counted from the end, so that a pass needs to know only how many are left.
    rank = rank - total
    is_chosen = jnp.diff(rank, prepend=-total) > 0

    def one_pass(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, found = carry
        place = jnp.arange(chunk, dtype=jnp.int32) - left
        # Counting is a search in one kernel: chunk * R * S comparisons, 2 ** 24 for 16 of 4096.
        at = jnp.sum(rank <= place[:, None], axis=1, dtype=jnp.int32)
        row, position = jnp.divmod(jnp.minimum(at, R * S - 1), S)
        stats = pallas_kernels.unembed_stats(
            sources.of(row, position),
            lm_head,
            forbidden_ids=config.forbidden_ids,
            num_rows=left,
            implementation=config.implementation,
            **({} if draws is None else draws.options(row, position)),
        )
        best = pallas_kernels.probability(stats.best_logit, stats.logsumexp)
        second = pallas_kernels.probability(stats.second_logit, stats.logsumexp)
        new = _to_words(
            stats.drawn_id,
            stats.drawn_logit - stats.logsumexp,
            jnp.maximum(stats.entropy, 0.0),
            best - second,
        )
        slot = rank - 1 + left
        is_here = (is_chosen & (slot >= 0) & (slot < chunk)).reshape(R, S)
        new = new[:, jnp.clip(slot, 0, chunk - 1).reshape(R, S)]
        return left - chunk, jnp.where(is_here, new, found)

    return jax.lax.while_loop(lambda carry: carry[0] > 0, one_pass, (total, found))[1]
