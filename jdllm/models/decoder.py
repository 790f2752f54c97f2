"""The decoder that the families share: embedding, pre-norm layers, final norm, LM head.

A family is a subclass that chooses the feed-forward of each layer. Layers are unrolled,
one array per layer. Attention and caches are the caller's: see `layers/attention.py`. The LM head
is not applied here, because serving streams the vocabulary and only for positions
that can still change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jdllm.layers import attention, mlp, moe, norm, rope
from jdllm.models import decoder_config

# Odd constants of common integer hashes; any that mix well would do.
_HASH_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0x2C1B3C6D)


class DecoderLayer(nnx.Module):
    """One pre-norm layer over a feed-forward that the family chose, dense or routed."""

    def __init__(
        self,
        config: decoder_config.DecoderConfig,
        feed_forward: mlp.DenseMLP | moe.SparseMoE,
        *,
        qk_norm_eps: float | None,
        has_qkv_bias: bool,
        dtype: jnp.dtype,
        implementation: str,
    ):
        model, eps = config.spec, config.rms_norm_eps
        self.ops = moe.ops_around_experts(implementation)
        self.input_layernorm = norm.RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.attention = attention.Attention(
            attention.AttentionConfig(
                dim=config.hidden_size,
                num_query_heads=model.num_query_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                qk_norm_eps=qk_norm_eps,
                has_qkv_bias=has_qkv_bias,
            ),
            dtype=dtype,
            implementation=self.ops,
        )
        self.post_attention_layernorm = norm.RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.mlp = feed_forward

    def __call__(
        self,
        x: jax.Array,
        pending: tuple[jax.Array, ...],
        angles: tuple[jax.Array, jax.Array],
        *,
        attend: attention.Attend,
        cache: Any,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], Any]:
        """Returns the residual stream, what is still to be added to it, and the new cache.

        All activations are [T, D]. The last additions of a layer are left to the next norm, which
        does all of it at once.
        """
        if pending:
            x, h = self.input_layernorm.add(x, pending, implementation=self.ops)
        else:
            h = self.input_layernorm(x)
        out, cache = self.attention(h, angles, attend=attend, cache=cache)
        x, h = self.post_attention_layernorm.add(x, out, implementation=self.ops)
        if isinstance(self.mlp, moe.SparseMoE):
            return x, (self.mlp(h, valid=valid),), cache
        return x, self.mlp(h), cache


class Decoder(nnx.Module):
    """Hidden states of packed tokens; see `__call__`.

    `hash_embedding_positions` belongs to random weights only: it spreads equal
    tokens over the vocabulary, so that random routing spreads over the experts.
    """

    def __init__(
        self,
        config: decoder_config.DecoderConfig,
        feed_forward: Callable[[int], mlp.DenseMLP | moe.SparseMoE],  # of a layer
        *,
        qk_norm_eps: float | None,
        has_qkv_bias: bool,
        dtype: jnp.dtype,
        implementation: str,
        hash_embedding_positions: bool,
    ):
        self.config = config
        self.hash_embedding_positions = hash_embedding_positions
        self.ops = moe.ops_around_experts(implementation)
        shape = (config.spec.vocab_size, config.hidden_size)
        self.word_embeddings = nnx.Param(jnp.zeros(shape, dtype))
        self.layers = nnx.List(
            DecoderLayer(
                config,
                feed_forward(layer),
                qk_norm_eps=qk_norm_eps,
                has_qkv_bias=has_qkv_bias,
                dtype=dtype,
                implementation=implementation,
            )
            for layer in range(config.spec.num_layers)
        )
        self.norm = norm.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(jnp.zeros(shape, dtype))

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        attend: attention.Attend,
        caches: list[Any],
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        """Returns (hidden [T, D] after the final norm, one new cache per layer).

        `tokens` and `positions` are int32 [T]; tokens where `valid` is false touch no expert.
        """
        x = self.embed(tokens, positions)
        angles = self.angles(positions)
        pending, new_caches = (), []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, pending, cache = layer(x, pending, angles, attend=attend, cache=cache, valid=valid)
            new_caches.append(cache)
        return self.norm.add(x, pending, implementation=self.ops)[1], new_caches

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the embeddings [T, D]."""
        if self.hash_embedding_positions:
            tokens = _hash_rows(tokens, positions, self.config.spec.vocab_size)
        return jnp.take(self.word_embeddings[...], tokens, axis=0, mode="clip")

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the rotary (cos, sin), each [T, rotary_dim / 2], that every layer shares."""
        return rope.rope_angles(
            positions, rotary_dim=self.config.spec.rotary_dim, theta=self.config.rope_theta
        )

    def unembedding(self) -> jax.Array:
        """Returns the LM head [V, D]: its own array, or the embedding where they are tied."""
        return (self.word_embeddings if self.lm_head is None else self.lm_head)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [T, V]; for training and oracles, not for serving."""
        return jnp.einsum(
            "TD,VD->TV", hidden, self.unembedding(), preferred_element_type=jnp.float32
        )


def _hash_rows(tokens: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    token_mix, position_mix, last_mix = jnp.array(_HASH_MULTIPLIERS, jnp.uint32)
    mixed = tokens.astype(jnp.uint32) * token_mix + positions.astype(jnp.uint32) * position_mix
    mixed = (mixed ^ (mixed >> 15)) * last_mix
    return ((mixed ^ (mixed >> 13)) % jnp.uint32(vocab_size)).astype(jnp.int32)
