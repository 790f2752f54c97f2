"""From hidden states of packed windows to a `CanvasProposal`: the vocabulary statistics.

The vocabulary is streamed only for the wanted positions, a fixed number of them in each pass. So
forwards of all sizes of a launch share one compiled shape of the op (lowering its kernel takes
seconds). Rows that sample have separate passes, so that they change no bit of the other rows.
Their draws depend on seed, position and step alone.

Letters: R rows, S positions of the longest canvas, T packed tokens, C positions of a pass.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

import pallas_kernels
from jdllm.decoding.canvas.interface import CanvasProposal
from jdllm.layers import unembedding
from jdllm.runner import logit_rows
from jdllm.runner.canvas import asked
from jdllm.runner.canvas.inputs import CanvasInputs
from jdllm.runner.canvas.packing import Packing
from jdllm.runner.canvas.sources import DrawOptions, Draws, Sources
from jdllm.runner.canvas.state import CanvasState, algorithms
from jdllm.runner.config import StepConfig
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
    config: StepConfig,
    inputs: CanvasInputs,
    lm_head: unembedding.LMHead,
    state: CanvasState,
    packing: Packing,
    hidden: Float[Array, "T D"],
    *,
    chunk: int,
) -> tuple[CanvasProposal, Bool[Array, " R"], logit_rows.TopTokens | None]:
    """Returns the proposal for the wanted positions, and which rows have NaN in their statistics.

    The lists of the best tokens come with it in launches with rows that need their logits. `chunk`
    is the result of `positions_of_a_pass`.
    """
    params, window = inputs.params, state.window
    samples = params.temperature > 0
    tempers, scale = jnp.zeros_like(samples), None
    for i, algorithm in enumerate(algorithms(config)):
        if algorithm.tempers:
            tempers |= (inputs.algorithm == i) & samples
            scale = 1.0 / jnp.where(tempers, params.temperature, 1.0)
    draws = Draws(
        temperature=jnp.where(tempers, 1.0, params.temperature), seed=params.seed, step=state.step
    )
    sources = Sources(hidden=hidden, edge=state.edge, packing=packing, low=window.low, scale=scale)
    take = functools.partial(_statistics, config, lm_head, sources, chunk=chunk)
    streamed = window.wanted
    if inputs.logits is not None:
        streamed &= ~inputs.logits.edits[:, None]
    # Separate passes for rows that sample: they change no bit of the other rows.
    of_kind = jnp.stack([streamed & ~samples[:, None], streamed & samples[:, None]])
    greedy, drawn = jnp.cumsum(of_kind.reshape(2, -1), axis=1, dtype=jnp.int32)
    found = take(greedy, jnp.zeros((len(_FIELDS), *window.wanted.shape), jnp.int32), None)
    found = take(drawn, found, draws)
    tokens, logprob, entropy, margin = _from_words(found)
    top = None
    if inputs.logits is not None:
        seen = asked.Found(
            tokens=tokens,
            logprob=logprob,
            entropy=entropy,
            margin=margin,
            top=logit_rows.no_tokens(*tokens.shape),
        )
        seen = asked.find(config, inputs, lm_head, state, sources, draws, seen)
        tokens, logprob, entropy, margin, top = (
            seen.tokens, seen.logprob, seen.entropy, seen.margin, seen.top
        )  # fmt: skip
    is_wanted = window.wanted
    proposal = CanvasProposal(
        tokens=jnp.where(is_wanted, tokens, state.tokens),
        prob=jnp.where(is_wanted, jnp.exp(logprob), 0.0),
        logprob=jnp.where(is_wanted, logprob, 0.0),
        entropy=jnp.where(is_wanted, entropy, jnp.inf),
        margin=jnp.where(is_wanted, margin, 0.0),
    )
    return proposal, jnp.any(is_wanted & jnp.isnan(logprob), axis=1), top


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
    config: StepConfig,
    lm_head: unembedding.LMHead,
    sources: Sources,
    rank: Int32[Array, " R*S"],
    found: Int32[Array, "4 R S"],
    draws: Draws | None,
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
        options: DrawOptions = {} if draws is None else draws.options(row, position)
        stats = lm_head.stats(
            sources.of(row, position),
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
