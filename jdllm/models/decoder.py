"""The decoder that the families share: embedding, pre-norm layers, final norm, LM head.

The config describes each layer, so a family is a config and its weight table; one whose ends
compute more (a scaled embedding, soft-capped logits) is a subclass with its own `embed`, `mix`
and `logits`. Layers are unrolled, one array per layer. Attention and caches are the caller's:
see `layers/attention.py`. The LM head is not applied here, because serving streams the vocabulary
and only for positions that can still change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jdllm.layers import attention, mlp, moe, norm, rope
from jdllm.models import decoder_config

# Odd constants of common integer hashes; any that mix well would do.
_HASH_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0x2C1B3C6D)

Angles = Mapping[rope.RopeConfig, tuple[jax.Array, jax.Array]]
# feed_forward(module, activations [T, D], valid [T] or None) -> arrays [T, D] whose sum it adds
FeedForward = Callable[
    [mlp.DenseMLP | moe.SparseMoE, jax.Array, jax.Array | None], tuple[jax.Array, ...]
]


def run_feed_forward(
    module: mlp.DenseMLP | moe.SparseMoE, x: jax.Array, valid: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Returns what a layer's feed-forward adds, as a sum of arrays [T, D]."""
    if isinstance(module, moe.SparseMoE):
        return (module(x, valid=valid),)
    return module(x)


class DecoderLayer(nnx.Module):
    """One pre-norm layer over a feed-forward, dense or routed."""

    def __init__(
        self,
        config: decoder_config.LayerConfig,
        *,
        eps: float,
        dtype: jnp.dtype,
        implementation: str,
    ):
        dim = config.attention.dim
        self.ops = moe.ops_around_experts(implementation)
        self.input_layernorm = norm.RMSNorm(dim, eps=eps, dtype=dtype)
        self.attention = attention.Attention(config.attention, dtype=dtype, implementation=self.ops)
        self.post_attention_layernorm = norm.RMSNorm(dim, eps=eps, dtype=dtype)
        match config.feed_forward:
            case mlp.MLPConfig(width=width):
                self.mlp = mlp.DenseMLP(dim, width, dtype=dtype, implementation=self.ops)
            case moe.MoEConfig():
                self.mlp = moe.SparseMoE(
                    dim, config.feed_forward, dtype=dtype, implementation=implementation
                )
        post_norm = functools.partial(_post_norm, config, eps=eps, dtype=dtype)
        self.attention_post_norm, self.mlp_post_norm = post_norm(), post_norm()

    def __call__(
        self,
        x: jax.Array,
        pending: tuple[jax.Array, ...],
        angles: Angles,
        *,
        attend: attention.Attend,
        cache: Any,
        valid: jax.Array | None = None,
        feed_forward: FeedForward = run_feed_forward,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], Any]:
        """Returns the residual stream, what is still to be added to it, and the new cache.

        All activations are [T, D]. The last additions of a layer are left to the next norm, which
        does all of it at once.
        """
        if pending:
            x, h = self.input_layernorm.add(x, pending, implementation=self.ops)
        else:
            h = self.input_layernorm(x)
        kind = self.attention.config.rope
        out, cache = self.attention(h, angles[kind], attend=attend, cache=cache)
        out = _normalised(self.attention_post_norm, out)
        x, h = self.post_attention_layernorm.add(x, out, implementation=self.ops)
        return x, _normalised(self.mlp_post_norm, feed_forward(self.mlp, h, valid)), cache


class Decoder(nnx.Module):
    """Hidden states of packed tokens; see `__call__`.

    `hash_embedding_positions` belongs to random weights only: it spreads equal
    tokens over the vocabulary, so that random routing spreads over the experts.
    """

    def __init__(
        self,
        config: decoder_config.DecoderConfig,
        *,
        dtype: jnp.dtype,
        implementation: str = "auto",
        hash_embedding_positions: bool = False,
    ):
        self.config = config
        self.hash_embedding_positions = hash_embedding_positions
        self.ops = moe.ops_around_experts(implementation)
        dim, eps = config.spec.hidden_size, config.rms_norm_eps
        shape = (config.spec.vocab_size, dim)
        self.word_embeddings = nnx.Param(jnp.zeros(shape, dtype))
        self.layers = nnx.List(
            DecoderLayer(layer, eps=eps, dtype=dtype, implementation=implementation)
            for layer in config.layers
        )
        self.norm = norm.RMSNorm(dim, eps=eps, dtype=dtype)
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(jnp.zeros(shape, dtype))

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        attend: attention.Attend,
        caches: list[Any],
        valid: jax.Array | None = None,
        feed_forward: FeedForward = run_feed_forward,
    ) -> tuple[jax.Array, list[Any]]:
        """Returns (hidden [T, D] after the final norm, one new cache per layer).

        `tokens` and `positions` are int32 [T]; tokens where `valid` is false touch no expert.
        """
        return self.run_layers(
            self.embed(tokens, positions),
            positions,
            attend=attend,
            caches=caches,
            valid=valid,
            feed_forward=feed_forward,
        )

    def run_layers(
        self,
        x: jax.Array,
        positions: jax.Array,
        *,
        attend: attention.Attend,
        caches: list[Any],
        valid: jax.Array | None = None,
        feed_forward: FeedForward = run_feed_forward,
    ) -> tuple[jax.Array, list[Any]]:
        """Returns what `__call__` does, for embedded tokens `x` [T, D].

        This is the only loop over layers: whoever needs what the routers choose, or another form
        of the experts, passes its own `feed_forward`, which is called once per layer, in order.
        """
        angles = self.angles(positions)
        pending, new_caches = (), []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, pending, cache = layer(
                x,
                pending,
                angles,
                attend=attend,
                cache=cache,
                valid=valid,
                feed_forward=feed_forward,
            )
            new_caches.append(cache)
        return self.norm.add(x, pending, implementation=self.ops)[1], new_caches

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the embeddings [T, D]."""
        if self.hash_embedding_positions:
            tokens = _hash_rows(tokens, positions, self.config.spec.vocab_size)
        return jnp.take(self.word_embeddings[...], tokens, axis=0, mode="clip")

    def mix(self, weights: jax.Array) -> jax.Array:
        """Returns the embeddings [T, D] of mixtures of tokens, `weights` [T, V] of each."""
        return weights @ self.word_embeddings[...]

    def angles(self, positions: jax.Array) -> Angles:
        """Returns the rotary (cos, sin), each [T, rotary_dim / 2], of every kind of layer."""
        kinds = dict.fromkeys(layer.attention.rope for layer in self.config.layers)
        return {
            kind: rope.rope_angles(positions, rotary_dim=kind.rotary_dim, theta=kind.theta)
            for kind in kinds
        }

    def unembedding(self) -> jax.Array:
        """Returns the LM head [V, D]: its own array, or the embedding where they are tied."""
        return (self.word_embeddings if self.lm_head is None else self.lm_head)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [T, V]; for training and oracles, not for serving."""
        return jnp.einsum(
            "TD,VD->TV", hidden, self.unembedding(), preferred_element_type=jnp.float32
        )


def _post_norm(
    config: decoder_config.LayerConfig, *, eps: float, dtype: jnp.dtype
) -> norm.RMSNorm | None:
    dim = config.attention.dim
    return norm.RMSNorm(dim, eps=eps, dtype=dtype) if config.has_post_norms else None


def _normalised(
    post_norm: norm.RMSNorm | None, parts: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Returns what a sub-layer adds: its parts, or the norm of their sum."""
    return parts if post_norm is None else (post_norm(functools.reduce(jnp.add, parts)),)


def _hash_rows(tokens: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    token_mix, position_mix, last_mix = jnp.array(_HASH_MULTIPLIERS, jnp.uint32)
    mixed = tokens.astype(jnp.uint32) * token_mix + positions.astype(jnp.uint32) * position_mix
    mixed = (mixed ^ (mixed >> 15)) * last_mix
    return ((mixed ^ (mixed >> 13)) % jnp.uint32(vocab_size)).astype(jnp.int32)
