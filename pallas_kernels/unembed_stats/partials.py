"""Statistics of logits over a range of ids, how two ranges merge, and the noise of a draw.

The chunks of the XLA implementation, the partials of the GPU kernel and (later) the vocabulary
shards of tensor parallelism are all `PartialStats`, and `merge` is the only rule that joins them.
It is exact for ids and logits: any order and grouping of ranges gives the same bits. The sums are
rescaled, so their rounding depends on the grouping; every user fixes it by static shapes.

A draw is Gumbel-max: of all allowed ids the one with the highest logit / temperature + noise. The
noise is a function of the row's key and the id alone (a counter-based hash), so it does not depend
on chunk, tile, bucket, row or neighbours, and the implementations agree in every bit of the hash.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

# Finite: 0 * -inf would be nan in the entropy sum.
LOWEST = -1e30
NO_ID = 2**30  # higher than any id: loses every tie

_GOLDEN = 0x9E3779B1  # odd, so that multiplying by it permutes the 32-bit words
_MIX = (0x21F0AAAD, 0xD35A2D97)  # with shifts 16, 15, 15 a low-bias 32-bit mixer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialStats:
    """Statistics over a range of ids; every field is [T] (or a scalar inside a reduction).

    The drawn fields are None where nothing is drawn.
    """

    high: jax.Array  # no logit of the range is higher, forbidden ids included
    total: jax.Array  # sum of exp(logit - high)
    moment: jax.Array  # sum of exp(logit - high) * (logit - high)
    best_id: jax.Array
    best_logit: jax.Array
    second_id: jax.Array
    second_logit: jax.Array
    given_logit: jax.Array
    drawn_score: jax.Array | None  # logit / temperature + noise of the drawn id
    drawn_id: jax.Array | None
    drawn_logit: jax.Array | None


def empty(shape: tuple[int, ...], *, draws: bool) -> PartialStats:
    """Returns the statistics of no id at all: merging them changes nothing."""
    zero, lowest = jnp.zeros(shape, jnp.float32), jnp.full(shape, LOWEST, jnp.float32)
    no_id = jnp.full(shape, NO_ID, jnp.int32)
    return PartialStats(
        high=lowest, total=zero, moment=zero, best_id=no_id, best_logit=lowest, second_id=no_id,
        second_logit=lowest, given_logit=zero, drawn_score=lowest if draws else None,
        drawn_id=no_id if draws else None, drawn_logit=zero if draws else None,
    )  # fmt: skip


def merge(left: PartialStats, right: PartialStats) -> PartialStats:
    """Returns the statistics of two disjoint ranges of ids, in either order.

    The lower id wins ties.
    """
    high = jnp.maximum(left.high, right.high)
    left_shift, right_shift = left.high - high, right.high - high
    left_scale, right_scale = jnp.exp(left_shift), jnp.exp(right_shift)
    best = _ahead(right.best_logit, right.best_id, left.best_logit, left.best_id)
    # The loser's best competes with the winner's second.
    loser_logit = jnp.where(best, left.best_logit, right.best_logit)
    loser_id = jnp.where(best, left.best_id, right.best_id)
    next_logit = jnp.where(best, right.second_logit, left.second_logit)
    next_id = jnp.where(best, right.second_id, left.second_id)
    second = _ahead(next_logit, next_id, loser_logit, loser_id)
    if left.drawn_score is None:
        drawn = (None, None, None)
    else:
        won = _ahead(right.drawn_score, right.drawn_id, left.drawn_score, left.drawn_id)
        drawn = (
            jnp.where(won, right.drawn_score, left.drawn_score),
            jnp.where(won, right.drawn_id, left.drawn_id),
            jnp.where(won, right.drawn_logit, left.drawn_logit),
        )
    return PartialStats(
        high=high,
        total=left_scale * left.total + right_scale * right.total,
        moment=left_scale * (left.moment + left_shift * left.total)
        + right_scale * (right.moment + right_shift * right.total),
        best_id=jnp.where(best, right.best_id, left.best_id),
        best_logit=jnp.where(best, right.best_logit, left.best_logit),
        second_id=jnp.where(second, next_id, loser_id),
        second_logit=jnp.where(second, next_logit, loser_logit),
        given_logit=left.given_logit + right.given_logit,
        drawn_score=drawn[0],
        drawn_id=drawn[1],
        drawn_logit=drawn[2],
    )


def merge_all(partials: PartialStats) -> PartialStats:
    """Returns the merge over the last axis; one fusion on a GPU."""
    leaves, structure = jax.tree.flatten(partials)
    start = jax.tree.leaves(empty((), draws=partials.drawn_score is not None))

    def join(left, right):
        merged = merge(structure.unflatten(left), structure.unflatten(right))
        return tuple(jax.tree.leaves(merged))

    return structure.unflatten(lax.reduce(tuple(leaves), tuple(start), join, (leaves[0].ndim - 1,)))


def draw_words(draw_keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two uint32 [T] words that `noise` takes, from keys uint32 [T, 2].

    Mixed here, once per row, so that neighbouring keys such as (seed, position) do no harm.
    """
    first = _mix(draw_keys[:, 0] + jnp.uint32(_GOLDEN))
    second = _mix(draw_keys[:, 1] ^ first)
    return _mix(first + second), second


def noise(counter: jax.Array, word: jax.Array) -> jax.Array:
    """Returns standard Gumbel noise of `counter = draw_counter(first word, id)` and second word.

    Only operations that lower on a Mosaic GPU accumulator.
    """
    bits = counter ^ lax.shift_right_logical(counter, jnp.uint32(16))
    bits = bits * jnp.uint32(_MIX[0])
    bits = bits ^ lax.shift_right_logical(bits, jnp.uint32(15))
    bits = (bits + word) * jnp.uint32(_MIX[1])
    bits = bits ^ lax.shift_right_logical(bits, jnp.uint32(15))
    # The winner has the lowest exponential variate of a whole vocabulary: its low end needs all
    # 32 bits, which 1 - uniform in float32 does not have.
    uniform = bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33
    series = uniform + uniform * uniform * (0.5 + uniform * (1 / 3))  # -log(1 - uniform)
    exponential = jnp.where(uniform < 2.0**-7, series, -jnp.log(1.0 - uniform))
    return -jnp.log(exponential)


def draw_counter(word: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the uint32 that `noise` hashes; linear in the id, so a tile may add its offset."""
    return ids.astype(jnp.uint32) * jnp.uint32(_GOLDEN) + word


def _ahead(logit, token_id, other_logit, other_id) -> jax.Array:
    return (logit > other_logit) | ((logit == other_logit) & (token_id < other_id))


def _mix(word: jax.Array) -> jax.Array:
    word = (word ^ (word >> 16)) * jnp.uint32(_MIX[0])
    word = (word ^ (word >> 15)) * jnp.uint32(_MIX[1])
    return word ^ (word >> 15)
