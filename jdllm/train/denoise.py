"""Greedy block denoising of whole sequences, for measuring a model while it trains.

The rule is that of serving, LowConfidence, on the current block. No KV cache: every forward
runs the whole sequence, which is exact and cheap for a small model. A threshold of 1 or more
writes one token per step.

With block-causal attention blocks lie at multiples of their size, the first one holds the
prompt's tail, and a forward of its own persists each block but the last. With full attention
the rest of the row is a canvas: blocks begin at the prompt's end, the last may be short,
later ones are masked and visible. FastDLLM does the same by its threshold, except that it
writes what equals the threshold, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdllm import algorithms, spec
from jdllm.decoding.block import interface, low_confidence
from jdllm.layers import attention
from jdllm.models import loading
from jdllm.train.step import Network, Params

RULE = low_confidence.LowConfidence()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Denoised:
    """Rows during and after denoising; `forwards` counts persist forwards too, if there are any."""

    tokens: jax.Array  # int32 [B, S]
    masked: jax.Array  # bool [B, S]
    prompt_lens: jax.Array  # int32 [B]
    block: jax.Array  # int32 [B], the block being written
    forwards: jax.Array  # int32 [B]
    done: jax.Array  # bool [B]


def denoiser(
    network: Network, *, length: int, stop_ids: tuple[int, ...]
) -> Callable[[Params, jax.Array, jax.Array, jax.Array], Denoised]:
    """Returns the jitted `denoise(params, tokens [B, S], prompt_lens [B], threshold)`.

    `params` are in compute dtypes. Only the prompt of `tokens` is read.
    """
    diffusion = network.config.spec.diffusion
    visible = jnp.asarray(
        attention.visibility_mask(length, diffusion.block_size, diffusion.attention_pattern)
    )

    @jax.jit
    def denoise(
        params: Params, tokens: jax.Array, prompt_lens: jax.Array, threshold: jax.Array
    ) -> Denoised:
        masked = jnp.arange(length) >= prompt_lens[:, None]
        rows = tokens.shape[0]
        start = Denoised(
            tokens=jnp.where(masked, diffusion.mask_token_id, tokens.astype(jnp.int32)),
            masked=masked,
            prompt_lens=prompt_lens,
            block=(prompt_lens - _origin(diffusion, prompt_lens)) // diffusion.block_size,
            forwards=jnp.zeros(rows, jnp.int32),
            done=jnp.zeros(rows, bool),
        )
        body = functools.partial(
            _step, network, params, visible=visible, threshold=threshold, stop_ids=stop_ids
        )
        return jax.lax.while_loop(lambda rows: ~jnp.all(rows.done), body, start)

    return denoise


def _step(
    network: Network,
    params: Params,
    rows: Denoised,
    *,
    visible: jax.Array,
    threshold: jax.Array,
    stop_ids: tuple[int, ...],
) -> Denoised:
    diffusion = network.config.spec.diffusion
    B, S = rows.tokens.shape
    begin = _origin(diffusion, rows.prompt_lens) + rows.block * diffusion.block_size
    place = begin[:, None] + jnp.arange(diffusion.block_size)  # past S in a short last block
    in_block = functools.partial(jnp.take_along_axis, indices=place, axis=1, mode="clip")
    is_answer = place >= rows.prompt_lens[:, None]
    options = algorithms.padding(algorithms.BLOCK, B) | {"threshold": jnp.full(B, threshold)}
    block = interface.BlockState(
        tokens=in_block(rows.tokens),
        masked=in_block(rows.masked) & (place < S),
        editable=is_answer & (place < S),
        done=rows.done,
        params=interface.BlockParams(**options),
        extra=RULE.init_extra(B, diffusion.block_size),
    )
    logits = _block_logits(network, params, rows.tokens, place, visible)  # [B, block, V]
    after = RULE.update(block, _proposal(logits, diffusion.mask_token_id))
    is_final = RULE.is_final(after) & ~rows.done
    # A stop token of the prompt's tail does not end the answer.
    is_stop = jnp.isin(after.tokens, jnp.array(stop_ids)) & is_answer
    is_last = begin + diffusion.block_size >= S
    done = rows.done | (is_final & (jnp.any(is_stop, axis=-1) | is_last))
    persists = is_final & ~done & (RULE.persists_apart and not diffusion.has_canvas)
    row = jnp.arange(B)[:, None]
    return Denoised(
        tokens=rows.tokens.at[row, place].set(after.tokens, mode="drop"),
        masked=rows.masked.at[row, place].set(after.masked, mode="drop"),
        prompt_lens=rows.prompt_lens,
        block=rows.block + (is_final & ~done),
        forwards=rows.forwards + ~rows.done + persists,
        done=done,
    )


def _proposal(logits: jax.Array, mask_token_id: int | None) -> interface.Proposal:
    """Returns the greedy proposal of logits [B, block, V]."""
    logprobs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    allowed = logprobs.at[..., mask_token_id].set(-jnp.inf)
    tokens, logprob = jnp.argmax(allowed, axis=-1), jnp.max(allowed, axis=-1)
    prob = jnp.exp(logprob)
    return interface.Proposal(
        tokens=tokens,
        prob=prob,
        best=tokens,
        best_prob=prob,
        is_drawn=jnp.zeros(tokens.shape[:1], bool),
        logprob=logprob,
        best_logprob=logprob,
    )


def _origin(diffusion: spec.DiffusionSpec, prompt_lens: jax.Array) -> jax.Array:
    """Returns [B], where block 0 of each row begins."""
    return prompt_lens if diffusion.has_canvas else jnp.zeros_like(prompt_lens)


def _block_logits(
    network: Network, params: Params, tokens: jax.Array, place: jax.Array, visible: jax.Array
) -> jax.Array:
    B, S = tokens.shape
    model = loading.merge(network.graphdef, params)
    positions = jnp.tile(jnp.arange(S), B)
    hidden, _ = model(
        tokens.reshape(-1),
        positions,
        attend=attention.dense_attend(visible, B),
        caches=[None] * network.config.spec.num_layers,
    )
    place = jnp.minimum(place, S - 1)
    hidden = hidden.reshape(B, S, -1)[jnp.arange(B)[:, None], place]  # [B, block, D]
    return model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*place.shape, -1)
