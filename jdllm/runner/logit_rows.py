"""Rows that need their logits: their options as arrays, edits of logits, lists of the best tokens.

Launches with such a row have programs of their own, so that all other launches pay nothing. The
logits of one row at a time are in memory, [T, V] float32. The edits come before everything else: a
row's proposals, probabilities, draws and log-probabilities are those of the edited logits. In this
order:

1. `repetition_penalty` r: z / r if z > 0, else z * r, of each token in the context or the prompt;
2. `frequency_penalty` f and `presence_penalty` p: z - f * count - p * (count > 0);
3. `logit_bias`: z + bias;
4. tokens that are not allowed, bad words, and end tokens before the minimum: no probability.

`count` is how often the token stands in the *context* of the position: all output tokens that are
written when the step begins, to the left and to the right, without the position itself, and
only those before the first end token. (A model fills its canvas with end tokens behind the
output; counted, they would keep the output from ending.)

Letters: R rows, T positions of one row, V vocabulary, S tokens of a row, W words of a bit per token
of the vocabulary, N entries of `logit_bias`, K tokens of a list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jdllm.options import logit_options, sampling_params
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.request import Request

NEVER = -1e30  # the logit of a banned token; finite, so that differences stay numbers
MAX_TOP = sampling_params.MAX_TOP_LOGPROBS
NO_ID = batch_lib.NO_ID
_BITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogitRows:
    """What the rows of a launch want of their logits, padded with rows that want nothing.

    `edits`: the row's logits are edited. `num_top`: how many of the best tokens are listed.
    `bias_ids` is V where there is no bias. `banned` and `ends` have a bit for each token: banned
    everywhere, and the row's end tokens, which are banned before position `first_end`.
    `prompt_len`: positions from there on are output. The arrays are numpy's on the host and traced
    in the launch.
    """

    edits: Bool[Any, " R"]
    num_top: Int32[Any, " R"]
    prompt_len: Int32[Any, " R"]
    first_end: Int32[Any, " R"]
    repetition: Float32[Any, " R"]
    frequency: Float32[Any, " R"]
    presence: Float32[Any, " R"]
    min_p: Float32[Any, " R"]
    bias_ids: Int32[Any, "R N"]
    bias: Float32[Any, "R N"]
    banned: UInt32[Any, "R W"]
    ends: UInt32[Any, "R W"]

    @property
    def is_wanted(self) -> Bool[Array, " R"]:
        """Returns which rows need their logits."""
        return self.edits | (self.num_top > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The best tokens of each position, the best first; `NO_ID` where there are no more.

    The arrays are traced in the launch and numpy's on the host, hence `Any`.
    """

    ids: Int32[Any, "*P K"]
    logprobs: Float32[Any, "*P K"]

    def where(self, condition: Bool[Array, "*P"], other: TopTokens) -> TopTokens:
        """Returns these lists where the condition holds, else those of `other`."""
        return jax.tree.map(lambda a, b: jnp.where(condition[..., None], a, b), self, other)

    def moved(self, source: Int32[Array, "R L"] | None) -> TopTokens:
        """Returns the lists [R, L, K] after tokens moved; a new position gets arbitrary ones."""
        if source is None:
            return self
        place = jnp.minimum(source, source.shape[1] - 1)[..., None]
        return jax.tree.map(lambda a: jnp.take_along_axis(a, place, axis=1), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the penalties of one row count; `is_counted` says which of its tokens `counts` has."""

    counts: Int32[Array, " V"]
    in_prompt: Bool[Array, " V"]
    is_counted: Bool[Array, " S"]


def build(batch: ScheduleBatch, vocab_size: int) -> LogitRows:
    """Returns the options of the batch's rows."""
    R, W = batch.bucket.rows, -(-vocab_size // _BITS)

    def of(value: float, dtype: Any) -> np.ndarray:
        return np.full((R,), value, dtype)

    rows = LogitRows(
        edits=of(False, bool),
        num_top=of(0, np.int32),
        prompt_len=of(0, np.int32),
        first_end=of(0, np.int32),
        repetition=of(1, np.float32),
        frequency=of(0, np.float32),
        presence=of(0, np.float32),
        min_p=of(0, np.float32),
        bias_ids=np.full((R, logit_options.MAX_LOGIT_BIAS), vocab_size, np.int32),
        bias=np.zeros((R, logit_options.MAX_LOGIT_BIAS), np.float32),
        banned=np.zeros((R, W), np.uint32),
        ends=np.zeros((R, W), np.uint32),
    )
    for i, row in enumerate(batch.rows):
        if row.request.sampling.needs_logits:
            _fill(rows, i, row.request, vocab_size)
    return rows


def _fill(rows: LogitRows, i: int, request: Request, vocab_size: int) -> None:
    sampling = request.sampling
    rows.edits[i], rows.num_top[i] = sampling.edits_logits, sampling.top_logprobs
    rows.prompt_len[i] = len(request.prompt_ids)
    rows.first_end[i] = len(request.prompt_ids) + (sampling.min_new_tokens or 0)
    rows.repetition[i] = sampling.repetition_penalty or 1.0
    rows.frequency[i] = sampling.frequency_penalty or 0.0
    rows.presence[i] = sampling.presence_penalty or 0.0
    rows.min_p[i] = sampling.min_p or 0.0
    for at, (token_id, bias) in enumerate(sampling.logit_bias):
        rows.bias_ids[i, at], rows.bias[i, at] = token_id, bias
    if sampling.allowed_token_ids is not None:
        rows.banned[i] = ~_bits(sampling.allowed_token_ids, vocab_size)
    rows.banned[i] |= _bits(request.banned_ids, vocab_size)
    rows.ends[i] = _bits(request.end_token_ids, vocab_size)


def _bits(ids: Iterable[int], vocab_size: int) -> UInt32[np.ndarray, " W"]:
    is_in = np.zeros((-(-vocab_size // _BITS) * _BITS,), bool)
    is_in[list(ids)] = True
    return np.packbits(is_in, bitorder="little").view("<u4").astype(np.uint32)


def no_tokens(*shape: int) -> TopTokens:
    """Returns empty lists for positions of this shape."""
    return TopTokens(
        ids=jnp.full((*shape, MAX_TOP), NO_ID, jnp.int32),
        logprobs=jnp.zeros((*shape, MAX_TOP), jnp.float32),
    )


# For one row; `row` has the fields of `LogitRows` without R.


def context(
    row: LogitRows,
    tokens: Int32[Array, " S"],
    is_prompt: Bool[Array, " S"],
    is_written: Bool[Array, " S"],
    vocab_size: int,
) -> Context:
    """Returns what the penalties count, of a row's tokens in order.

    `is_written`: output tokens that are written. What is neither that nor prompt does not count.
    """
    S, V = tokens.shape[0], vocab_size
    place = jnp.arange(S, dtype=jnp.int32)
    word = row.ends[jnp.clip(tokens // _BITS, 0, row.ends.shape[0] - 1)]
    is_end = is_written & ((word >> (tokens % _BITS).astype(jnp.uint32)) & 1 > 0)
    is_counted = is_written & (place < jnp.min(jnp.where(is_end, place, S)))
    # Ids past the vocabulary are dropped.
    counts = jnp.zeros((V,), jnp.int32).at[jnp.where(is_counted, tokens, V)].add(1, mode="drop")
    in_prompt = jnp.zeros((V,), jnp.int32).at[jnp.where(is_prompt, tokens, V)].add(1, mode="drop")
    return Context(counts=counts, in_prompt=in_prompt > 0, is_counted=is_counted)


def edit(
    row: LogitRows,
    logits: Float32[Array, "T V"],
    context: Context,
    positions: Int32[Array, " T"],
    tokens: Int32[Array, " T"],
) -> Float32[Array, "T V"]:
    """Returns the edited logits of positions that hold `tokens`."""
    T, V = logits.shape
    at, own = jnp.arange(T), jnp.clip(tokens, 0, V - 1)
    # A position's own token is no context for it, or an edit would undo each edit before.
    others = context.counts[own] - context.is_counted[positions]
    own_logit = _penalize(row, logits[at, own], others, context.in_prompt[own])
    edited = _penalize(row, logits, context.counts, context.in_prompt).at[at, own].set(own_logit)
    edited += jnp.zeros((V,), jnp.float32).at[row.bias_ids].add(row.bias, mode="drop")
    is_early = (positions < row.first_end)[:, None]
    is_banned = _is_in(row.banned, V) | (_is_in(row.ends, V) & is_early)
    return jnp.where(is_banned, NEVER, edited)


def _penalize(
    row: LogitRows, logits: jax.Array, counts: jax.Array, in_prompt: jax.Array
) -> jax.Array:
    is_known = in_prompt | (counts > 0)
    scaled = jnp.where(logits > 0, logits / row.repetition, logits * row.repetition)
    logits = jnp.where(is_known, scaled, logits)
    return logits - row.frequency * counts - row.presence * (counts > 0)


def _is_in(words: UInt32[Array, " W"], vocab_size: int) -> Bool[Array, " V"]:
    bits = words[:, None] >> jnp.arange(_BITS, dtype=jnp.uint32)
    return (bits.reshape(-1)[:vocab_size] & 1) > 0


def top_tokens(
    logits: Float32[Array, "T V"],
    logsumexp: Float32[Array, " T"],
    count: Int32[Array, ""],
    forbidden_ids: tuple[int, ...],
) -> TopTokens:
    """Returns the `count` best tokens of each position; of equal logits, the lowest id first.

    Each of them takes a pass over the logits. A sort cannot run inside a loop on the device.
    """
    at = jnp.arange(logits.shape[0])
    for token_id in forbidden_ids:
        logits = logits.at[:, token_id].set(NEVER)

    def one(i: Int32[Array, ""], carry: tuple[Array, TopTokens]) -> tuple[Array, TopTokens]:
        left, top = carry
        best = jnp.argmax(left, axis=1).astype(jnp.int32)
        logit = left[at, best]
        is_there = logit > NEVER / 2
        found = TopTokens(
            ids=top.ids.at[:, i].set(jnp.where(is_there, best, NO_ID)),
            logprobs=top.logprobs.at[:, i].set(jnp.where(is_there, logit - logsumexp, 0.0)),
        )
        return left.at[at, best].set(NEVER), found

    return jax.lax.fori_loop(0, count, one, (logits, no_tokens(logits.shape[0])))[1]
