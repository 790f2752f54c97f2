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
from jdllm.decoding import canvas
from jdllm.runner import canvas_state, forward_batch, steps
from jdllm.runner.canvas_packing import Packing
from jdllm.scheduler import batch as batch_lib

# Positions of a pass: of one row, of several. A pass reads the whole LM head, which takes as long
# as multiplying some 200 positions by it.
POSITIONS_OF_A_PASS = (128, 256)


def positions_of_a_pass(rows: int, most: int) -> int:
    """Returns how many positions a pass takes, in launches of up to `most` packed tokens."""
    return min(POSITIONS_OF_A_PASS[rows > 1], batch_lib.packed_len(most))


def propose(
    config: steps.StepConfig,
    inputs: forward_batch.CanvasInputs,
    lm_head: jax.Array,
    state: canvas_state.CanvasState,
    packing: Packing,
    hidden: jax.Array,  # [T, D]
    *,
    chunk: int,
) -> tuple[canvas.CanvasProposal, jax.Array]:
    """Returns the proposal for the wanted positions, and [R]: a row's statistics are NaN.

    `chunk`: `positions_of_a_pass`.
    """
    R, S = state.tokens.shape
    T = hidden.shape[0]
    is_shifted = state.edge.shape[1] > 0
    params = inputs.params
    # Source i < T: packed token i; T + r: the position before row r's window.
    row, predicted = packing.row, packing.positions + is_shifted
    source_row, sources = row, hidden
    is_source = packing.is_valid & (predicted < S)
    if is_shifted:
        source_row = jnp.concatenate([row, jnp.arange(R, dtype=jnp.int32)])
        predicted = jnp.concatenate([predicted, state.window.low])
        is_source = jnp.concatenate([is_source, ~state.is_finished])
        sources = jnp.concatenate([hidden, state.edge.astype(hidden.dtype)])
    predicted = jnp.minimum(predicted, S - 1)
    wanted = is_source & state.window.wanted[source_row, predicted]

    samples = params.temperature > 0
    tempers = jnp.zeros_like(samples)
    for i, algorithm in enumerate(canvas_state.algorithms(config)):
        if algorithm.tempers:
            tempers |= (inputs.algorithm == i) & samples
    scale = 1.0 / jnp.where(tempers, params.temperature, 1.0)
    draws = _Draws(
        temperature=jnp.where(tempers, 1.0, params.temperature)[source_row],
        seed=params.seed[source_row],
        position=predicted,
        step=state.step[source_row],
    )
    take = functools.partial(
        _statistics,
        config,
        lm_head,
        sources,
        scale[source_row],
        chunk=chunk,
    )
    # Rows that sample have passes of their own, so that they change no bit of the others'.
    greedy = take(wanted & ~samples[source_row], None)
    drawn = take(wanted & samples[source_row], draws)
    stats = jax.tree.map(
        lambda a, b: jnp.where(samples[source_row], b, a), greedy, drawn
    )  # each [sources]

    at = jnp.arange(S, dtype=jnp.int32) - is_shifted - state.window.low[:, None]  # [R, S]
    place = packing.cu_q_lens[:-1, None] + at
    place = jnp.where(at < 0, T + jnp.arange(R, dtype=jnp.int32)[:, None], place)
    place = jnp.clip(place, 0, sources.shape[0] - 1)
    tokens, logprob, entropy, margin = (field[place] for field in stats)
    is_wanted = state.window.wanted
    proposal = canvas.CanvasProposal(
        tokens=jnp.where(is_wanted, tokens, state.tokens),
        prob=jnp.where(is_wanted, jnp.exp(logprob), 0.0),
        logprob=jnp.where(is_wanted, logprob, 0.0),
        entropy=jnp.where(is_wanted, entropy, jnp.inf),
        margin=jnp.where(is_wanted, margin, 0.0),
    )
    return proposal, jnp.any(is_wanted & jnp.isnan(logprob), axis=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """What a draw depends on, per source: [N] each, but `seed` [N, 2]."""

    temperature: jax.Array
    seed: jax.Array
    position: jax.Array
    step: jax.Array

    def keys(self, chosen: jax.Array) -> jax.Array:
        """Returns uint32 [chosen, 2], one key per source, by seed, position and step."""

        def key(seed: jax.Array, position: jax.Array, step: jax.Array) -> jax.Array:
            of_position = jax.random.fold_in(jax.random.wrap_key_data(seed), position)
            return jax.random.key_data(jax.random.fold_in(of_position, step))

        return jax.vmap(key)(self.seed[chosen], self.position[chosen], self.step[chosen])


Statistics = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # tokens, logprob, entropy, margin


def _statistics(
    config: steps.StepConfig,
    lm_head: jax.Array,  # [V, D]
    sources: jax.Array,  # [N, D]
    scale: jax.Array,  # [N]
    wanted: jax.Array,  # [N] bool
    draws: _Draws | None,
    *,
    chunk: int,
) -> Statistics:
    """Returns [N] statistics of the wanted sources, anything elsewhere, `chunk` of them a pass."""
    N = wanted.shape[0]
    mask_id = config.spec.diffusion.mask_token_id
    count = jnp.sum(wanted, dtype=jnp.int32)
    (order,) = jnp.nonzero(wanted, size=N, fill_value=0)
    place = jnp.arange(chunk, dtype=jnp.int32)

    def one_pass(turn: jax.Array, found: Statistics) -> Statistics:
        slots = turn * chunk + place
        chosen = order[jnp.minimum(slots, N - 1)]
        x = (sources[chosen].astype(jnp.float32) * scale[chosen, None]).astype(sources.dtype)
        options = {}
        if draws is not None:
            options = {"draw_keys": draws.keys(chosen), "temperature": draws.temperature[chosen]}
        stats = pallas_kernels.unembed_stats(
            x,
            lm_head,
            forbidden_ids=(mask_id,),
            num_rows=jnp.clip(count - turn * chunk, 0, chunk),
            implementation=config.implementation,
            **options,
        )
        best = pallas_kernels.probability(stats.best_logit, stats.logsumexp)
        second = pallas_kernels.probability(stats.second_logit, stats.logsumexp)
        new = (
            stats.drawn_id,
            stats.drawn_logit - stats.logsumexp,
            jnp.maximum(stats.entropy, 0.0),
            best - second,
        )
        # To the sources themselves; what is behind the last wanted one is dropped.
        target = jnp.where(slots < count, chosen, N)
        return tuple(
            old.at[target].set(values, mode="drop") for old, values in zip(found, new, strict=True)
        )

    zeros = jnp.zeros((N,), jnp.float32)
    start = (jnp.zeros((N,), jnp.int32), zeros, zeros, zeros)
    return jax.lax.fori_loop(0, (count + chunk - 1) // chunk, one_pass, start)
