"""Statistics of logits over a range of ids, how two ranges merge, and the noise of a draw.

The chunks of the XLA implementation, the partials of the GPU kernel and the vocabulary shards of
tensor parallelism are all `PartialStats`, and `merge` is the only rule that joins them.
It is exact for ids and logits: any order and grouping of ranges gives the same bits. The sums are
rescaled, so their rounding depends on the grouping; static shapes fix the grouping everywhere.

A draw is Gumbel-max: it takes the allowed id with the highest logit / temperature + noise. The
noise is a function of the row's key and the id alone (a counter-based hash), so it does not depend
on chunk, tile, bucket, row or neighbours, and the implementations agree in every bit of the hash.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from pallas_kernels.exchange_words import api
from pallas_kernels.peers import Peers

# Finite: 0 * -inf would be nan in the entropy sum.
LOWEST = -1e30
NO_ID = 2**30  # higher than any id, so it loses every tie

_GOLDEN = 0x9E3779B1  # odd, so that multiplying by it permutes the 32-bit words
_MIX = (0x21F0AAAD, 0xD35A2D97)  # a low-bias 32-bit mixer, with the shifts 16, 15, 15


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialStats:
    """Statistics over a range of ids.

    The shape of every field is [T], [T, ranges] for `merge_all`, or [] inside a reduction. The
    drawn fields are None if nothing is drawn.
    """

    high: Float32[Array, "*T"]  # no logit of the range is higher, forbidden ids included
    total: Float32[Array, "*T"]  # sum of exp(logit - high)
    moment: Float32[Array, "*T"]  # sum of exp(logit - high) * (logit - high)
    best_id: Int32[Array, "*T"]
    best_logit: Float32[Array, "*T"]
    second_id: Int32[Array, "*T"]
    second_logit: Float32[Array, "*T"]
    given_logit: Float32[Array, "*T"]
    drawn_score: Float32[Array, "*T"] | None  # logit / temperature + noise of the drawn id
    drawn_id: Int32[Array, "*T"] | None
    drawn_logit: Float32[Array, "*T"] | None


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
        left_score, left_id, left_logit = _drawn(left)
        right_score, right_id, right_logit = _drawn(right)
        won = _ahead(right_score, right_id, left_score, left_id)
        drawn = (
            jnp.where(won, right_score, left_score),
            jnp.where(won, right_id, left_id),
            jnp.where(won, right_logit, left_logit),
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
    """Returns the merge over the last axis of every field; it is one fusion on a GPU."""
    leaves, structure = jax.tree.flatten(partials)
    start = jax.tree.leaves(empty((), draws=partials.drawn_score is not None))

    def join(left, right):
        merged = merge(structure.unflatten(left), structure.unflatten(right))
        return tuple(jax.tree.leaves(merged))

    return structure.unflatten(lax.reduce(tuple(leaves), tuple(start), join, (leaves[0].ndim - 1,)))


def merge_ranks(mine: PartialStats, axis_name: str, peers: Peers | None = None) -> PartialStats:
    """Returns the merge of every rank's statistics, in rank order: the same bits on all ranks.

    All fields travel together, as words: 44 bytes for each token, or 32 if nothing is drawn.
    """
    leaves, structure = jax.tree.flatten(mine)
    words = jnp.stack([lax.bitcast_convert_type(leaf, jnp.int32) for leaf in leaves])
    ranks = api.exchange_words(words, axis_name=axis_name, peers=peers)

    def of(rank: jax.Array) -> PartialStats:
        fields = zip(rank, leaves, strict=True)
        return structure.unflatten(lax.bitcast_convert_type(word, to.dtype) for word, to in fields)

    return functools.reduce(merge, [of(ranks[rank]) for rank in range(len(ranks))])


def draw_words(
    draw_keys: UInt32[Array, "T 2"],
) -> tuple[UInt32[Array, " T"], UInt32[Array, " T"]]:
    """Returns the two words that `draw_counter` and `noise` take.

    The keys are mixed here, once per row, so that neighbouring keys, for example (seed, position),
    do no harm.
    """
    first = _mix(draw_keys[:, 0] + jnp.uint32(_GOLDEN))
    second = _mix(draw_keys[:, 1] ^ first)
    return _mix(first + second), second


def noise(counter: UInt32[Array, "..."], word: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns standard Gumbel noise of `counter = draw_counter(first word, id)` and second word.

    It uses only operations that lower on a Mosaic GPU accumulator.
    """
    bits = counter ^ lax.shift_right_logical(counter, jnp.uint32(16))
    bits = bits * jnp.uint32(_MIX[0])
    bits = bits ^ lax.shift_right_logical(bits, jnp.uint32(15))
    bits = (bits + word) * jnp.uint32(_MIX[1])
    bits = bits ^ lax.shift_right_logical(bits, jnp.uint32(15))
    # The winner has the lowest exponential variate of a whole vocabulary. So the low end needs all
    # 32 bits, and 1 - uniform in float32 does not have them.
    uniform = bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33
    series = uniform + uniform * uniform * (0.5 + uniform * (1 / 3))  # -log(1 - uniform)
    exponential = jnp.where(uniform < 2.0**-7, series, -jnp.log(1.0 - uniform))
    return -jnp.log(exponential)


def draw_counter(word: UInt32[Array, "..."], ids: Int32[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns the number that `noise` hashes; linear in the id, so a tile may add its offset."""
    return ids.astype(jnp.uint32) * jnp.uint32(_GOLDEN) + word


def _drawn(stats: PartialStats) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (score, id, logit) of the draw; statistics have all three or none."""
    assert stats.drawn_score is not None
    assert stats.drawn_id is not None
    assert stats.drawn_logit is not None
    return stats.drawn_score, stats.drawn_id, stats.drawn_logit


def _ahead(
    logit: jax.Array, token_id: jax.Array, other_logit: jax.Array, other_id: jax.Array
) -> jax.Array:
    return (logit > other_logit) | ((logit == other_logit) & (token_id < other_id))


def _mix(word: jax.Array) -> jax.Array:
    word = (word ^ (word >> 16)) * jnp.uint32(_MIX[0])
    word = (word ^ (word >> 15)) * jnp.uint32(_MIX[1])
    return word ^ (word >> 15)
