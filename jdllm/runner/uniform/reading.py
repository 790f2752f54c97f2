"""What a step reads of the logits of canvases: tempered statistics, draws, mixtures of embeddings.

The logits of one canvas at a time are in memory, [L, V] float32: a canvas has so many positions
that a row by itself fills the device. Where the vocabulary is split over ranks, each rank has the
logits of its ids; the ranks exchange statistics, and sum their parts of the mixture. The mixture is
the expected embedding under the tempered distribution, which the next step gets as
self-conditioning.

Letters: R rows, L positions of a canvas.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jdllm.models import gemma_decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """`entropy` (nats) and `drawn` are tempered, `logprob` is that of `best` at temperature 1.

    `expected` is the mixture of scaled embeddings. Rows that are not read hold zeros.
    """

    best: Int32[Array, "R L"]
    logprob: Float32[Array, "R L"]
    entropy: Float32[Array, "R L"]
    drawn: Int32[Array, "R L"]
    expected: Float[Array, "R L D"]


def read(
    model: gemma_decoder.GemmaDecoder,
    hidden: Float[Array, "R L D"],
    temperature: Float32[Array, " R"],
    draw_keys: UInt32[Array, "R L 2"],
    wanted: Bool[Array, " R"],
) -> Reading:
    """Returns the reading of the `wanted` rows."""
    R, L, D = hidden.shape
    (rows,) = jnp.nonzero(wanted, size=R, fill_value=0)
    nothing = Reading(
        best=jnp.zeros((R, L), jnp.int32),
        logprob=jnp.zeros((R, L), jnp.float32),
        entropy=jnp.zeros((R, L), jnp.float32),
        drawn=jnp.zeros((R, L), jnp.int32),
        expected=jnp.zeros((R, L, D), hidden.dtype),
    )

    def one(i: Int32[Array, ""], found: Reading) -> Reading:
        r = rows[i]
        mine = read_row(model, hidden[r], temperature[r], draw_keys[r])
        return jax.tree.map(lambda old, new: old.at[r].set(new), found, mine)

    # One turn for each row, also for a single one: it stays on the device.
    return jax.lax.fori_loop(0, jnp.sum(wanted), one, nothing)


def read_row(
    model: gemma_decoder.GemmaDecoder,
    hidden: Float[Array, "L D"],
    temperature: Float32[Array, ""],
    draw_keys: UInt32[Array, "L 2"],
) -> Reading:
    """Returns the reading of one row, whose fields lack R."""
    with jax.named_scope("head"):
        head = model.unembedding()
        logits = head.local_logits(hidden)  # [L, V / ranks]
        # Of the logits as they are: tempered ones may round to equal numbers.
        plain = head.stats_of(logits)
        tempered = logits / temperature
        ones = jnp.ones(logits.shape[:1], jnp.float32)
        stats = head.stats_of(tempered, draw_keys=draw_keys, temperature=ones)
    with jax.named_scope("mixture"):
        share = jnp.exp(tempered - stats.logsumexp[:, None])
        expected = model.mix(share).astype(hidden.dtype)
    return Reading(
        best=plain.best_id,
        logprob=plain.best_logit - plain.logsumexp,
        entropy=stats.entropy,
        drawn=stats.drawn_id,
        expected=expected,
    )
