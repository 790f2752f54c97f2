"""Statistics of the logits that decoding rules need, without all logits in memory.

One pass over the vocabulary keeps running statistics per token; only a bounded number of logits is
in memory at a time, whatever T and V are. The XLA implementation (`reference.py`) takes the
vocabulary in chunks. The GPU kernel (`mosaic_gpu.py`) takes it in tiles that never leave the
registers. Both end in the merge of `partials.py`, which could also combine vocabulary shards.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.peers import Peers
from pallas_kernels.unembed_stats import checks, mosaic_gpu, partials, reference
from pallas_kernels.unembed_stats.partials import PartialStats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnembedStats:
    """Statistics of the logits of each token.

    Forbidden ids are never best, second or drawn, but they count in logsumexp and entropy (nats). A
    row with a NaN logit has NaN in every float and 0 in every id.
    """

    best_id: Int32[Array, " T"]
    best_logit: Float32[Array, " T"]
    logsumexp: Float32[Array, " T"]
    entropy: Float32[Array, " T"]
    second_id: Int32[Array, " T"]
    second_logit: Float32[Array, " T"]
    given_logit: Float32[Array, " T"]  # 0 where no id was given
    drawn_id: Int32[Array, " T"]  # the best id where nothing is drawn
    drawn_logit: Float32[Array, " T"]


def choose(
    implementation: str = "auto",
    *,
    dtype: DTypeLike,
    hidden_size: int,
    forbidden_ids: tuple[int, ...] = (),
) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    reason = mosaic_gpu.why_not(
        dtype=dtype, hidden_size=hidden_size, num_forbidden=len(forbidden_ids)
    )
    return dispatch.choose("unembed_stats", implementation, refusals={"mosaic_gpu": reason})


def unembed_stats(
    x: Float[Array, "T D"],
    w: Float[Array, "V D"],
    *,
    forbidden_ids: tuple[int, ...] = (),
    given_ids: Int32[Array, " T"] | None = None,
    draw_keys: UInt32[Array, "T 2"] | None = None,
    temperature: Float32[Array, " T"] | None = None,
    num_rows: Int32[Array, ""] | None = None,
    axis_name: str | None = None,
    peers: Peers | None = None,
    implementation: str = "auto",
    chunk_size: int | None = None,
) -> UnembedStats:
    """Returns the statistics of x @ w.T; of equal logits, the lowest id wins.

    Rows with a positive temperature draw by their key (`partials.py`). The other rows, and all rows
    if there are no keys or temperatures, "draw" the best id. The caller wants only the first
    `num_rows` rows (default: all): behind them every field is 0, and the GPU kernel saves the time
    of these rows.

    With `axis_name`, the axis of a `shard_map`, `w` has the V / n rows of one of n ranks. The ranks
    exchange their statistics and merge them in rank order, so all have the same bits; ids and
    logits are exactly those of the whole vocabulary. `x` and the other arguments are equal on all
    ranks. `peers` are their buffers, if they have any (`exchange_words`).
    """
    num_ranks = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    checks.check_shapes(x, w, forbidden_ids, given_ids, draw_keys, temperature, num_rows, num_ranks)
    forbidden_ids = tuple(sorted(set(forbidden_ids)))
    chosen = choose(
        implementation,
        dtype=x.dtype,
        hidden_size=x.shape[1],
        forbidden_ids=forbidden_ids,
    )
    return _unembed_stats(
        x, w, given_ids=given_ids, draw_keys=draw_keys, temperature=temperature, num_rows=num_rows,
        forbidden_ids=forbidden_ids, implementation=chosen.implementation, chunk_size=chunk_size,
        axis_name=axis_name, peers=peers,
    )  # fmt: skip


def logits_stats(
    logits: Float32[Array, "T V"],
    *,
    forbidden_ids: tuple[int, ...] = (),
    draw_keys: UInt32[Array, "T 2"] | None = None,
    temperature: Float32[Array, " T"] | None = None,
    min_p: Float32[Array, " T"] | None = None,
    axis_name: str | None = None,
    peers: Peers | None = None,
) -> UnembedStats:
    """Returns what `unembed_stats` returns, of logits that the caller has computed and edited.

    An id with the logit `partials.LOWEST` has no probability at all. With `min_p`, no id is drawn
    whose tempered probability is less than `min_p` times that of the best id. XLA computes this on
    every device: the logits are in memory already.

    With `axis_name`, each rank has the logits of its V / n ids, as for `unembed_stats`. Raises
    ValueError for `min_p` then, whose limit is a logit of the whole vocabulary.
    """
    forbidden_ids = tuple(sorted(set(forbidden_ids)))
    rows, cold = _draw_rows(draw_keys, temperature, logits.shape[0])
    lowest = first_id = None
    if axis_name is not None:
        if min_p is not None:
            raise ValueError("logits_stats: min_p needs the logits of all ranks")
        first_id = _first_id(axis_name, peers, logits.shape[1])
    if min_p is not None and temperature is not None:
        allowed = (
            logits.at[:, list(forbidden_ids)].set(partials.LOWEST) if forbidden_ids else logits
        )
        lowest = jnp.max(allowed, axis=1) + temperature * jnp.log(min_p)
    total = reference.statistics_of(logits, rows, forbidden_ids, lowest, first_id)
    if axis_name is not None:
        total = partials.merge_ranks(total, axis_name, peers)
    return _finish(total, cold)


def probability(
    logit: Float32[Array, " T"], logsumexp: Float32[Array, " T"]
) -> Float32[Array, " T"]:
    """Returns the softmax probability of a logit."""
    return jnp.exp(logit - logsumexp)


def penalize(
    stats: UnembedStats, given_ids: Int32[Array, " T"], penalty: Float32[Array, " T"]
) -> UnembedStats:
    """Returns the statistics after each row's given logit is lowered by its `penalty` >= 0.

    `stats` must come from the same `given_ids`. best and logsumexp are exact. If the given id was
    best or second, the new second may be too low: the third best id is not known. Entropy and the
    drawn id do not change. A zero penalty changes no bit.
    """
    is_best = given_ids == stats.best_id
    given_logit = stats.given_logit - penalty
    best = (jnp.where(is_best, given_logit, stats.best_logit), stats.best_id)
    is_second = given_ids == stats.second_id
    second = (jnp.where(is_second, given_logit, stats.second_logit), stats.second_id)
    swap = (second[0] > best[0]) | ((second[0] == best[0]) & (second[1] < best[1]))
    mass = jnp.minimum(probability(stats.given_logit, stats.logsumexp), 1.0)
    logsumexp = stats.logsumexp + jnp.log1p(mass * jnp.expm1(-penalty))
    # If the given id had nearly all the mass, rounding may leave less mass than the two logits that
    # are known to remain: the penalised one and the best other one.
    other = jnp.where(is_best, stats.second_logit, stats.best_logit)
    logsumexp = jnp.maximum(logsumexp, jnp.logaddexp(given_logit, other))
    return dataclasses.replace(
        stats,
        best_id=jnp.where(swap, second[1], best[1]),
        best_logit=jnp.where(swap, second[0], best[0]),
        second_id=jnp.where(swap, best[1], second[1]),
        second_logit=jnp.where(swap, best[0], second[0]),
        logsumexp=jnp.where(penalty > 0, logsumexp, stats.logsumexp),
        given_logit=given_logit,
    )


@functools.partial(
    jax.jit, static_argnames=("forbidden_ids", "implementation", "chunk_size", "axis_name")
)
def _unembed_stats(
    x, w, *, given_ids, draw_keys, temperature, num_rows, forbidden_ids, implementation, chunk_size,
    axis_name, peers,
) -> UnembedStats:  # fmt: skip
    rows, cold = _draw_rows(draw_keys, temperature, x.shape[0])
    if given_ids is not None:
        rows = {"given_ids": given_ids} | rows
    first_id = None
    if axis_name is not None:
        first_id = _first_id(axis_name, peers, w.shape[0])
    if implementation == "mosaic_gpu":
        total = lowered_once.call(
            mosaic_gpu.partial_stats, x, w, rows, forbidden_ids=forbidden_ids, num_rows=num_rows,
            first_id=first_id,
        )  # fmt: skip
    else:
        total = reference.partial_stats(x, w, rows, forbidden_ids, chunk_size, first_id)
    if axis_name is not None:
        total = partials.merge_ranks(total, axis_name, peers)
    stats = _finish(total, cold)
    if num_rows is None:
        return stats
    wanted = jnp.arange(x.shape[0], dtype=jnp.int32) < num_rows
    return jax.tree.map(lambda field: jnp.where(wanted, field, 0), stats)


def _first_id(axis_name: str, peers: Peers | None, count: int) -> Int32[Array, ""]:
    """Returns the first of the `count` ids that this rank has."""
    return (jax.lax.axis_index(axis_name) if peers is None else peers.number) * count


def _draw_rows(
    draw_keys: jax.Array | None, temperature: jax.Array | None, count: int
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns what implementations need to draw, and which of the `count` rows draw nothing."""
    if draw_keys is None or temperature is None:
        return {}, jnp.ones(count, bool)
    cold = temperature <= 0
    inverse = 1.0 / jnp.where(cold, 1.0, jnp.maximum(temperature, 1e-6))
    first, second = partials.draw_words(draw_keys)
    return {"draw_first": first, "draw_second": second, "inverse_temperature": inverse}, cold


def _finish(total: PartialStats, cold: jax.Array) -> UnembedStats:
    log_total = jnp.log(total.total)
    broken = jnp.isnan(log_total)  # implementations treat a row with a NaN differently

    def logit(value: jax.Array) -> jax.Array:
        return jnp.where(broken, jnp.nan, value)

    def token(value: jax.Array) -> jax.Array:
        return jnp.where(broken, 0, value)

    best_id, best_logit = token(total.best_id), logit(total.best_logit)
    drawn_id, drawn_logit = best_id, best_logit
    if total.drawn_id is not None and total.drawn_logit is not None:
        drawn_id = jnp.where(cold, best_id, token(total.drawn_id))
        drawn_logit = jnp.where(cold, best_logit, logit(total.drawn_logit))
    return UnembedStats(
        best_id=best_id,
        best_logit=best_logit,
        logsumexp=total.high + log_total,
        entropy=log_total - total.moment / total.total,
        second_id=token(total.second_id),
        second_logit=logit(total.second_logit),
        given_logit=logit(total.given_logit),
        drawn_id=drawn_id,
        drawn_logit=drawn_logit,
    )
