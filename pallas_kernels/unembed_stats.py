"""What decoding rules need to know about the logits, without the logits.

One pass over the vocabulary in chunks keeps running statistics per token; the logits in memory at
once are bounded, whatever T and V are. Partial statistics of two id ranges merge like those of two
chunks (`_merge`), which is also how vocabulary shards would be combined.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch

# Logits held at once. Up to 512 tokens of a 157k vocabulary take one chunk: slicing copies the
# weights, which costs more memory and time than the logits (H200, 256 tokens: 0.5 ms, not 0.9).
_CHUNK_BYTES = 384 * 2**20

# Finite: 0 * -inf would be nan in the entropy sum.
_LOWEST = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnembedStats:
    """Statistics of one token's logits; every field is [T], ids int32 and the rest float32.

    Forbidden ids are never best or second, but stay in logsumexp and entropy (nats).
    """

    best_id: jax.Array
    best_logit: jax.Array
    logsumexp: jax.Array
    entropy: jax.Array
    second_id: jax.Array
    second_logit: jax.Array
    given_logit: jax.Array  # 0 where no id was given


@functools.partial(jax.jit, static_argnames=("forbidden_ids", "implementation", "chunk_size"))
def unembed_stats(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [V, D]
    *,
    forbidden_ids: tuple[int, ...] = (),
    given_ids: jax.Array | None = None,  # int32 [T]
    implementation: str = "auto",
    chunk_size: int | None = None,
) -> UnembedStats:
    """Returns the statistics of x @ w.T; ties go to the lowest id."""
    _check_shapes(x, w, forbidden_ids, given_ids)
    dispatch.choose("unembed_stats", implementation)  # raises on what cannot run
    T, V = x.shape[0], w.shape[0]
    size = min(chunk_size or _default_chunk(T, V), V)

    def statistics(chunk: jax.Array, start: jax.Array | int, first_new: jax.Array | int):
        ids = start + jnp.arange(chunk.shape[0], dtype=jnp.int32)
        fresh = ids >= first_new
        allowed = fresh & ~_is_any_of(ids, forbidden_ids)
        logits = jnp.einsum("td,vd->tv", x, chunk, preferred_element_type=jnp.float32)
        return _chunk_statistics(logits, start, fresh, allowed, given_ids)

    def step(state: _Partial, index: jax.Array) -> tuple[_Partial, None]:
        # The last chunk starts early and masks what was seen: padding w would copy it.
        start = jnp.minimum(index * size, V - size)
        chunk = lax.dynamic_slice_in_dim(w, start, size)
        return _merge(state, statistics(chunk, start, index * size)), None

    if size == V:
        return _finish(statistics(w, 0, 0))
    chunks = jnp.arange(-(-V // size), dtype=jnp.int32)
    return _finish(lax.scan(step, _empty(T), chunks)[0])


def probability(logit: jax.Array, logsumexp: jax.Array) -> jax.Array:
    """Returns the softmax probability of a logit."""
    return jnp.exp(logit - logsumexp)


def penalize(stats: UnembedStats, given_ids: jax.Array, penalty: jax.Array) -> UnembedStats:
    """Returns the statistics after `penalty` >= 0 is taken off each row's given logit.

    best and logsumexp are exact; `stats` must come from the same `given_ids`. Where the given id
    was best or second, the new second is only the better known of the two (the third is not
    kept). Entropy is left as it was. A zero penalty changes no bit.
    """
    is_best = given_ids == stats.best_id
    given_logit = stats.given_logit - penalty
    best = (jnp.where(is_best, given_logit, stats.best_logit), stats.best_id)
    is_second = given_ids == stats.second_id
    second = (jnp.where(is_second, given_logit, stats.second_logit), stats.second_id)
    swap = (second[0] > best[0]) | ((second[0] == best[0]) & (second[1] < best[1]))
    mass = jnp.minimum(probability(stats.given_logit, stats.logsumexp), 1.0)
    logsumexp = stats.logsumexp + jnp.log1p(mass * jnp.expm1(-penalty))
    # When the given id held nearly all the mass, rounding may leave less than what is known to
    # remain: the penalised logit and the best other one.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Partial:
    """Statistics over a range of ids; every field is [T]."""

    high: jax.Array  # max logit, forbidden ids included
    total: jax.Array  # sum of exp(logit - high)
    moment: jax.Array  # sum of exp(logit - high) * (logit - high)
    best_id: jax.Array
    best_logit: jax.Array
    second_id: jax.Array
    second_logit: jax.Array
    given_logit: jax.Array


def _empty(T: int) -> _Partial:
    zero, lowest = jnp.zeros(T, jnp.float32), jnp.full(T, _LOWEST, jnp.float32)
    no_id = jnp.zeros(T, jnp.int32)
    return _Partial(
        high=lowest, total=zero, moment=zero, best_id=no_id, best_logit=lowest,
        second_id=no_id, second_logit=lowest, given_logit=zero,
    )  # fmt: skip


def _chunk_statistics(logits, start, fresh, allowed, given_ids) -> _Partial:
    T, size = logits.shape
    high = jnp.where(fresh, logits, _LOWEST).max(axis=1)
    below = jnp.where(fresh, logits - high[:, None], _LOWEST)
    weight = jnp.exp(below)
    candidates = jnp.where(allowed, logits, _LOWEST)
    best = jnp.argmax(candidates, axis=1).astype(jnp.int32)  # the lowest of equals
    others = jnp.where(jnp.arange(size) == best[:, None], _LOWEST, candidates)
    second = jnp.argmax(others, axis=1).astype(jnp.int32)
    given_logit = jnp.zeros(T, jnp.float32)
    if given_ids is not None:
        here = fresh & (start + jnp.arange(size) == given_ids[:, None])
        given_logit = jnp.where(here, logits, 0.0).sum(axis=1)
    return _Partial(
        high=high,
        total=weight.sum(axis=1),
        moment=(weight * below).sum(axis=1),
        best_id=start + best,
        best_logit=jnp.take_along_axis(candidates, best[:, None], axis=1)[:, 0],
        second_id=start + second,
        second_logit=jnp.take_along_axis(others, second[:, None], axis=1)[:, 0],
        given_logit=given_logit,
    )


def _merge(left: _Partial, right: _Partial) -> _Partial:
    """Merges two ranges; all ids of `left` are lower, so `left` wins ties."""
    high = jnp.maximum(left.high, right.high)
    left_shift, right_shift = left.high - high, right.high - high
    left_scale, right_scale = jnp.exp(left_shift), jnp.exp(right_shift)
    right_best = right.best_logit > left.best_logit
    # The loser's best competes with the winner's second.
    low_id = jnp.where(right_best, left.best_id, left.second_id)
    low_logit = jnp.where(right_best, left.best_logit, left.second_logit)
    up_id = jnp.where(right_best, right.second_id, right.best_id)
    up_logit = jnp.where(right_best, right.second_logit, right.best_logit)
    right_second = up_logit > low_logit
    return _Partial(
        high=high,
        total=left_scale * left.total + right_scale * right.total,
        moment=left_scale * (left.moment + left_shift * left.total)
        + right_scale * (right.moment + right_shift * right.total),
        best_id=jnp.where(right_best, right.best_id, left.best_id),
        best_logit=jnp.where(right_best, right.best_logit, left.best_logit),
        second_id=jnp.where(right_second, up_id, low_id),
        second_logit=jnp.where(right_second, up_logit, low_logit),
        given_logit=left.given_logit + right.given_logit,
    )


def _finish(total: _Partial) -> UnembedStats:
    log_total = jnp.log(total.total)
    return UnembedStats(
        best_id=total.best_id,
        best_logit=total.best_logit,
        logsumexp=total.high + log_total,
        entropy=log_total - total.moment / total.total,
        second_id=total.second_id,
        second_logit=total.second_logit,
        given_logit=total.given_logit,
    )


def _default_chunk(T: int, V: int) -> int:
    chunks = -(-4 * T * V // _CHUNK_BYTES)
    return -(-V // chunks)


def _is_any_of(ids: jax.Array, few: tuple[int, ...]) -> jax.Array:
    found = jnp.zeros(ids.shape, bool)
    for one in few:
        found |= ids == one
    return found


def _check_shapes(x, w, forbidden_ids, given_ids) -> None:
    shapes = (
        f"x {x.dtype}{x.shape}, w {w.dtype}{w.shape}, {forbidden_ids=}, "
        f"given_ids {None if given_ids is None else given_ids.shape}"
    )
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"unembed_stats: x must be [T, D] and w [V, D]: {shapes}")
    V = w.shape[0]
    problems = {
        "x and w must have one dtype": x.dtype != w.dtype,
        "forbidden ids must lie in [0, V)": any(not 0 <= i < V for i in forbidden_ids),
        "at least two ids must be allowed": V - len(set(forbidden_ids)) < 2,
        "given_ids must be [T]": given_ids is not None and given_ids.shape != x.shape[:1],
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"unembed_stats: {problem}: {shapes}")
