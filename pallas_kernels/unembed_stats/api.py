"""What decoding rules need to know about the logits, without the logits.

One pass over the vocabulary keeps running statistics per token; the logits in memory at once are
bounded, whatever T and V are. The XLA implementation (`reference.py`) takes the vocabulary in
chunks, the GPU kernel (`mosaic_gpu.py`) in tiles that never leave the registers; both end in the
merge of `partials.py`, which is also how vocabulary shards would be combined.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.unembed_stats import checks, partials, reference
from pallas_kernels.unembed_stats import mosaic_gpu as gpu_kernel
from pallas_kernels.unembed_stats.partials import PartialStats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnembedStats:
    """Statistics of one token's logits; every field is [T], ids int32 and the rest float32.

    Forbidden ids are never best, second or drawn, but stay in logsumexp and entropy (nats). A row
    with a NaN logit has NaN in every float and 0 in every id.
    """

    best_id: jax.Array
    best_logit: jax.Array
    logsumexp: jax.Array
    entropy: jax.Array
    second_id: jax.Array
    second_logit: jax.Array
    given_logit: jax.Array  # 0 where no id was given
    drawn_id: jax.Array  # the best id where nothing is drawn
    drawn_logit: jax.Array


def choose(
    implementation: str = "auto", *, dtype, hidden_size: int, forbidden_ids: tuple[int, ...] = ()
) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    reason = gpu_kernel.why_not(
        dtype=dtype, hidden_size=hidden_size, num_forbidden=len(forbidden_ids)
    )
    return dispatch.choose("unembed_stats", implementation, refusals={"mosaic_gpu": reason})


def unembed_stats(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [V, D]
    *,
    forbidden_ids: tuple[int, ...] = (),
    given_ids: jax.Array | None = None,  # int32 [T]
    draw_keys: jax.Array | None = None,  # uint32 [T, 2]
    temperature: jax.Array | None = None,  # float32 [T]
    num_rows: jax.Array | None = None,  # int32 []
    implementation: str = "auto",
    chunk_size: int | None = None,
) -> UnembedStats:
    """Returns the statistics of x @ w.T; ties go to the lowest id.

    Rows whose temperature is positive draw by their key (`partials.py`); the others, and all
    rows without keys or temperatures, "draw" the best id. Only the first `num_rows` rows are
    wanted (all, where it is absent): every field is 0 behind them, and the GPU kernel saves their
    time.
    """
    checks.check_shapes(x, w, forbidden_ids, given_ids, draw_keys, temperature, num_rows)
    forbidden_ids = tuple(sorted(set(forbidden_ids)))
    chosen = choose(
        implementation, dtype=x.dtype, hidden_size=x.shape[1], forbidden_ids=forbidden_ids
    )
    return _unembed_stats(
        x, w, given_ids=given_ids, draw_keys=draw_keys, temperature=temperature, num_rows=num_rows,
        forbidden_ids=forbidden_ids, implementation=chosen.implementation, chunk_size=chunk_size,
    )  # fmt: skip


def probability(logit: jax.Array, logsumexp: jax.Array) -> jax.Array:
    """Returns the softmax probability of a logit."""
    return jnp.exp(logit - logsumexp)


def penalize(stats: UnembedStats, given_ids: jax.Array, penalty: jax.Array) -> UnembedStats:
    """Returns the statistics after `penalty` >= 0 is taken off each row's given logit.

    best and logsumexp are exact; `stats` must come from the same `given_ids`. Where the given id
    was best or second, the new second is only the better known of the two (the third is not
    kept). Entropy and the drawn id are left as they were. A zero penalty changes no bit.
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


@functools.partial(jax.jit, static_argnames=("forbidden_ids", "implementation", "chunk_size"))
def _unembed_stats(
    x, w, *, given_ids, draw_keys, temperature, num_rows, forbidden_ids, implementation, chunk_size
) -> UnembedStats:
    rows = {} if given_ids is None else {"given_ids": given_ids}
    if draw_keys is not None and temperature is not None:
        cold = temperature <= 0
        inverse = 1.0 / jnp.where(cold, 1.0, jnp.maximum(temperature, 1e-6))
        first, second = partials.draw_words(draw_keys)
        rows |= {"draw_first": first, "draw_second": second, "inverse_temperature": inverse}
    else:
        cold = jnp.ones(x.shape[0], bool)
    if implementation == "mosaic_gpu":
        total = lowered_once.call(
            gpu_kernel.partial_stats, x, w, rows, forbidden_ids=forbidden_ids, num_rows=num_rows
        )
    else:
        total = reference.partial_stats(x, w, rows, forbidden_ids, chunk_size)
    stats = _finish(total, cold)
    if num_rows is None:
        return stats
    wanted = jnp.arange(x.shape[0], dtype=jnp.int32) < num_rows
    return jax.tree.map(lambda field: jnp.where(wanted, field, 0), stats)


def _finish(total: PartialStats, cold: jax.Array) -> UnembedStats:
    log_total = jnp.log(total.total)
    broken = jnp.isnan(log_total)  # implementations keep different logits of a row with a NaN

    def logit(value: jax.Array) -> jax.Array:
        return jnp.where(broken, jnp.nan, value)

    def token(value: jax.Array) -> jax.Array:
        return jnp.where(broken, 0, value)

    best_id, best_logit = token(total.best_id), logit(total.best_logit)
    drawn_id, drawn_logit = best_id, best_logit
    if total.drawn_id is not None:
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
