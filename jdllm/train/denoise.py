"""Greedy block denoising of whole sequences, which measures a model during training.

The rule for the current block is LowConfidence, as in serving. There is no KV cache: every
forward runs the whole sequence, which is exact and cheap for a small model. With a threshold of 1
or more, a step writes one token.

With block-causal attention, blocks begin at multiples of their size. The first block holds the
prompt's tail, and an extra forward persists each block but the last. With full attention, the
rest of the row is a canvas: blocks begin at the prompt's end, the last one may be short, and
later blocks are masked and visible. FastDLLM does the same with its threshold, but it also writes
a position whose probability equals the threshold.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jdllm import spec
from jdllm.algorithms import lookup
from jdllm.decoding.block import interface, low_confidence
from jdllm.layers import attention
from jdllm.models import loading
from jdllm.train.step import Network, Params

RULE = low_confidence.LowConfidence()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Denoised:
    """Rows during and after denoising.

    `block` is the number of the block that the row writes now. `forwards` also counts the
    forwards that persist a block.
    """

    tokens: Int32[Array, "B S"]
    masked: Bool[Array, "B S"]
    prompt_lens: Int32[Array, " B"]
    block: Int32[Array, " B"]
    forwards: Int32[Array, " B"]
    done: Bool[Array, " B"]


def denoiser(
    network: Network, *, length: int, stop_ids: tuple[int, ...]
) -> Callable[
    [Params, Int[Array, "B S"], Int[Array, " B"], Float[Array, ""]],
    Denoised,
]:
    """Returns the jitted `denoise(params, tokens, prompt_lens, threshold)`.

    `params` are in compute dtypes. The function reads only the prompts in `tokens`.
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
            tokens=jnp.where(masked, network.mask_token_id, tokens.astype(jnp.int32)),
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
    visible: Bool[Array, "S S"],
    threshold: Float[Array, ""],
    stop_ids: tuple[int, ...],
) -> Denoised:
    diffusion = network.config.spec.diffusion
    B, S = rows.tokens.shape
    begin = _origin(diffusion, rows.prompt_lens) + rows.block * diffusion.block_size
    place = begin[:, None] + jnp.arange(diffusion.block_size)  # past S in a short last block
    in_block = functools.partial(jnp.take_along_axis, indices=place, axis=1, mode="clip")
    is_answer = place >= rows.prompt_lens[:, None]
    options = lookup.padding(lookup.BLOCK, B) | {"threshold": jnp.full(B, threshold)}
    block = interface.BlockState(
        tokens=in_block(rows.tokens),
        masked=in_block(rows.masked) & (place < S),
        editable=is_answer & (place < S),
        done=rows.done,
        params=interface.BlockParams(**options),
        extra=RULE.init_extra(B, diffusion.block_size),
    )
    logits = _block_logits(network, params, rows.tokens, place, visible)  # [B, block, V]
    after = RULE.update(block, _proposal(logits, network.mask_token_id))
    is_final = RULE.is_final(after) & ~rows.done
    # A stop token in the prompt's tail does not end the answer.
    is_stop = jnp.isin(after.tokens, jnp.array(stop_ids)) & is_answer
    is_last = begin + diffusion.block_size >= S
    done = rows.done | (is_final & (jnp.any(is_stop, axis=-1) | is_last))
    persists = is_final & ~done & (RULE.persists_apart and diffusion.kind == "block")
    row = jnp.arange(B)[:, None]
    return Denoised(
        tokens=rows.tokens.at[row, place].set(after.tokens, mode="drop"),
        masked=rows.masked.at[row, place].set(after.masked, mode="drop"),
        prompt_lens=rows.prompt_lens,
        block=rows.block + (is_final & ~done),
        forwards=rows.forwards + ~rows.done + persists,
        done=done,
    )


def _proposal(logits: Float32[Array, "B T V"], mask_token_id: int) -> interface.Proposal:
    """Returns the greedy proposal for the logits of a block."""
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
        draw_prob=prob,
        entropy=-jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1),
    )


def _origin(diffusion: spec.DiffusionSpec, prompt_lens: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns the position where block 0 of each row begins."""
    return prompt_lens if diffusion.kind == "canvas" else jnp.zeros_like(prompt_lens)


def _block_logits(
    network: Network,
    params: Params,
    tokens: Int[Array, "B S"],
    place: Int[Array, "B T"],
    visible: Bool[Array, "S S"],
) -> Float32[Array, "B T V"]:
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
