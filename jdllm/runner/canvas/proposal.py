"""From hidden states of packed windows to a `CanvasProposal`: the vocabulary statistics.

The vocabulary is streamed only for the wanted positions, a fixed number of them in each pass. So
forwards of all sizes of a launch share one compiled shape of the op (lowering its kernel takes
seconds). Rows that sample have separate passes, so that they change no bit of the other rows.
Their draws depend on seed, position and step alone.

Letters: R rows, S positions of the longest canvas, T packed tokens, C positions of a pass.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped, UInt32

import pallas_kernels
from jdllm.decoding.canvas import interface as canvas
from jdllm.runner import config as config_lib
from jdllm.runner.canvas import inputs as inputs_lib
from jdllm.runner.canvas import packing as packing_lib
from jdllm.runner.canvas import state as state_lib
from jdllm.scheduler.rows import canvas as canvas_rows

# Positions of a pass in launches of one row, and of several rows. A pass reads the whole LM head,
# which takes as long as multiplying about 200 positions by it.
POSITIONS_OF_A_PASS = (128, 256)
# The passes carry tokens, logprob, entropy and margin as words of one array, which takes one kernel
# to initialise and one to fill.
_FIELDS = (jnp.int32, jnp.float32, jnp.float32, jnp.float32)


def positions_of_a_pass(rows: int, most: int) -> int:
    """Returns how many positions a pass takes in launches of up to `most` packed tokens."""
    return min(POSITIONS_OF_A_PASS[rows > 1], canvas_rows.packed_len(most))


def propose(
    config: config_lib.StepConfig,
    inputs: inputs_lib.CanvasInputs,
    lm_head: Float[Array, "V D"],
    state: state_lib.CanvasState,
    packing: packing_lib.Packing,
    hidden: Float[Array, "T D"],
    *,
    chunk: int,
) -> tuple[canvas.CanvasProposal, Bool[Array, " R"]]:
    """Returns the proposal for the wanted positions, and which rows have NaN in their statistics.

    `chunk` is the result of `positions_of_a_pass`.
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
    # Separate passes for rows that sample: they change no bit of the other rows.
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
    """The hidden states from which positions are predicted, and the factor that scales them.

    `edge` is [R, 0] unless logits are shifted; `scale` is None where no algorithm tempers.
    """

    hidden: Float[Array, "T D"]
    edge: Float[Array, "R D"]
    packing: packing_lib.Packing
    low: Int32[Array, " R"]
    scale: Float32[Array, " R"] | None

    def of(self, row: Int32[Array, " C"], position: Int32[Array, " C"]) -> Float[Array, "C D"]:
        """Returns the scaled states that predict `position` of `row`."""
        is_shifted = self.edge.shape[1] > 0
        offset = position - is_shifted - self.low[row]
        token = jnp.clip(self.packing.cu_q_lens[row] + offset, 0, self.hidden.shape[0] - 1)
        x = self.hidden[token]
        if is_shifted:
            x = jnp.where(offset[:, None] < 0, self.edge[row].astype(x.dtype), x)
        if self.scale is None:
            return x
        return (x.astype(jnp.float32) * self.scale[row, None]).astype(x.dtype)


class _DrawOptions(TypedDict, total=False):
    """The arguments of `unembed_stats` that make it draw."""

    draw_keys: UInt32[Array, "C 2"]
    temperature: Float32[Array, " C"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """What a draw depends on, besides its position."""

    temperature: Float32[Array, " R"]
    seed: UInt32[Array, "R 2"]
    step: Int32[Array, " R"]

    def options(self, row: Int32[Array, " C"], position: Int32[Array, " C"]) -> _DrawOptions:
        """Returns the temperature of each position, and its key from seed, position and step."""

        def key(
            seed: UInt32[Array, " 2"], position: Int32[Array, ""], step: Int32[Array, ""]
        ) -> UInt32[Array, " 2"]:
            of_position = jax.random.fold_in(jax.random.wrap_key_data(seed), position)
            return jax.random.key_data(jax.random.fold_in(of_position, step))

        keys = jax.vmap(key)(self.seed[row], position, self.step[row])
        return {"draw_keys": keys, "temperature": self.temperature[row]}


def _to_words(*fields: Shaped[Array, " C"]) -> Int32[Array, "4 C"]:
    """Returns four arrays as one array of words."""
    return jnp.stack([jax.lax.bitcast_convert_type(field, jnp.int32) for field in fields])


def _from_words(words: Int32[Array, "4 R S"]) -> list[Shaped[Array, "R S"]]:
    """Returns the four arrays that the words hold."""
    return [
        jax.lax.bitcast_convert_type(word, dtype)
        for word, dtype in zip(words, _FIELDS, strict=True)
    ]


def _statistics(
    config: config_lib.StepConfig,
    lm_head: Float[Array, "V D"],
    sources: _Sources,
    rank: Int32[Array, " R*S"],
    found: Int32[Array, "4 R S"],
    draws: _Draws | None,
    *,
    chunk: int,
) -> Int32[Array, "4 R S"]:
    """Returns `found` with the statistics of the chosen positions, `chunk` of them in each pass.

    `rank` counts the chosen positions up to and including each position, row after row.
    """
    R, S = found.shape[1:]
    total = rank[-1]
    # Ranks count from the end, so that a pass needs to know only how many positions are left.
    rank = rank - total
    is_chosen = jnp.diff(rank, prepend=-total) > 0

    def one_pass(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        left, found = carry
        place = jnp.arange(chunk, dtype=jnp.int32) - left
        # Counting is a search in one kernel, with chunk * R * S comparisons: 2 ** 24 for 16 rows of
        # 4,096.
        at = jnp.sum(rank <= place[:, None], axis=1, dtype=jnp.int32)
        row, position = jnp.divmod(jnp.minimum(at, R * S - 1), S)
        options: _DrawOptions = {} if draws is None else draws.options(row, position)
        stats = pallas_kernels.unembed_stats(
            sources.of(row, position),
            lm_head,
            forbidden_ids=config.forbidden_ids,
            num_rows=left,
            implementation=config.implementation,
            **options,
        )
        best = pallas_kernels.probability(stats.best_logit, stats.logsumexp)
        second = pallas_kernels.probability(stats.second_logit, stats.logsumexp)
        new = _to_words(
            stats.drawn_id,
            stats.drawn_logit - stats.logsumexp,
            jnp.maximum(stats.entropy, 0.0),
            best - second,
        )
        index = rank - 1 + left  # of a position in this pass
        is_here = (is_chosen & (index >= 0) & (index < chunk)).reshape(R, S)
        new = new[:, jnp.clip(index, 0, chunk - 1).reshape(R, S)]
        return left - chunk, jnp.where(is_here, new, found)

    return jax.lax.while_loop(lambda carry: carry[0] > 0, one_pass, (total, found))[1]
