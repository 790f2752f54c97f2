"""The decoder that the families share: embedding, pre-norm layers, final norm, LM head.

The config describes each layer, so a family is just a config and a weight table. A family with
another embedding, LM head or layer (a scaled embedding, soft-capped logits, two feed-forwards side
by side) is a subclass with its own `embed`, `mix`, `unembedding` and `build_layer`. Layers are
unrolled, one array per layer. The caller provides attention and caches: see `layers/attention.py`.
The forward pass does not apply the LM head, because serving streams the vocabulary, and only for
positions that can still change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from jdllm.layers import attention, mlp, moe, norm, rope, unembedding
from jdllm.models import decoder_config

# Odd constants of common integer hashes; other constants that mix well are just as good.
_HASH_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0x2C1B3C6D)

Activations = Float[Array, "T D"]
Angles = Mapping[rope.RopeConfig, rope.Rotation]
# feed_forward(module, x, valid): the layer adds the sum of the results to the residual stream.
FeedForwardModule = mlp.DenseMLP | moe.SparseMoE
FeedForward = Callable[
    [FeedForwardModule, Activations, Bool[Array, " T"] | None], tuple[Activations, ...]
]


class RunLayer(Protocol):
    """What the loop over layers calls."""

    def __call__(
        self,
        x: Activations,
        pending: tuple[Activations, ...],
        angles: Angles,
        *,
        attend: attention.Attend,
        cache: jax.Array | None,
        valid: Bool[Array, " T"] | None = None,
        feed_forward: FeedForward = ...,
    ) -> tuple[Activations, tuple[Activations, ...], jax.Array | None]:
        """Returns the residual stream, the arrays that it still lacks, and the new cache."""
        ...


class Layer(RunLayer, Protocol):
    """A layer of a decoder: a `DecoderLayer`, or a module of another class."""

    @property
    def mlp(self) -> FeedForwardModule:
        """The layer's feed-forward; the dense one, if it has several."""
        ...


def run_feed_forward(
    module: FeedForwardModule, x: Activations, valid: Bool[Array, " T"] | None
) -> tuple[Activations, ...]:
    """Returns arrays whose sum is the output of a layer's feed-forward."""
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
        num_ranks: int = 1,
    ):
        dim = config.attention.dim
        self.ops = moe.ops_around_experts(implementation)
        # The parts of all ranks are summed where they are first needed whole.
        adds_from = 1 if config.has_post_norms else num_ranks
        added_norm = functools.partial(norm.RMSNorm, dim, eps=eps, dtype=dtype, num_ranks=adds_from)
        self.input_layernorm = added_norm()
        self.attention = attention.Attention(config.attention, dtype=dtype, implementation=self.ops)
        self.post_attention_layernorm = added_norm()
        match config.feed_forward:
            case mlp.MLPConfig(width=width, activation=activation):
                self.mlp = mlp.DenseMLP(
                    dim, width, dtype=dtype, activation=activation, implementation=self.ops
                )
            case moe.MoEConfig():
                self.mlp = moe.SparseMoE(
                    dim, config.feed_forward, dtype=dtype, implementation=implementation
                )
        post_norm = functools.partial(_post_norm, config, eps=eps, dtype=dtype, num_ranks=num_ranks)
        self.attention_post_norm, self.mlp_post_norm = post_norm(), post_norm()

    def __call__(
        self,
        x: Activations,
        pending: tuple[Activations, ...],
        angles: Angles,
        *,
        attend: attention.Attend,
        cache: jax.Array | None,
        valid: Bool[Array, " T"] | None = None,
        feed_forward: FeedForward = run_feed_forward,
        drafts: Bool[Array, " T"] | None = None,
    ) -> tuple[Activations, tuple[Activations, ...], jax.Array | None]:
        """Returns the residual stream, the arrays that it still lacks, and the new cache.

        A layer does not add the output of its feed-forward. It leaves these additions to the next
        norm, which does all of them at once.
        """
        if pending:
            x, h = self.input_layernorm.add(x, pending, implementation=self.ops)
        else:
            h = self.input_layernorm(x)
        kind = self.attention.config.rope
        out, cache = self.attention(h, angles[kind], attend=attend, cache=cache, drafts=drafts)
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
        vocab_size, num_ranks = config.spec.vocab_size, config.shards.tp
        self.word_embeddings = nnx.Param(jnp.zeros((vocab_size, dim), dtype))
        self.layers = nnx.List(
            self.build_layer(layer, dtype=dtype, implementation=implementation)
            for layer in config.layers
        )
        is_last_whole = bool(config.layers) and config.layers[-1].has_post_norms
        self.norm = norm.RMSNorm(
            dim, eps=eps, dtype=dtype, num_ranks=1 if is_last_whole else num_ranks
        )
        head_shape = (vocab_size // num_ranks, dim)
        self.lm_head = (
            None if config.tie_word_embeddings else nnx.Param(jnp.zeros(head_shape, dtype))
        )

    def build_layer(
        self, layer: decoder_config.LayerConfig, *, dtype: jnp.dtype, implementation: str
    ) -> Layer:
        """Returns a new layer; `config` is set already."""
        return DecoderLayer(
            layer,
            eps=self.config.rms_norm_eps,
            dtype=dtype,
            implementation=implementation,
            num_ranks=self.config.shards.tp,
        )

    def __call__(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        *,
        attend: attention.Attend,
        caches: Sequence[jax.Array | None],
        valid: Bool[Array, " T"] | None = None,
        feed_forward: FeedForward = run_feed_forward,
        drafts: Bool[Array, " T"] | None = None,
    ) -> tuple[Activations, list[jax.Array | None]]:
        """Returns the hidden states after the final norm, and one new cache per layer.

        Tokens where `valid` is false go to no expert. Those of `drafts` use the adapter, which the
        model must have.
        """
        return self.run_layers(
            self.embed(tokens, positions),
            positions,
            attend=attend,
            caches=caches,
            valid=valid,
            feed_forward=feed_forward,
            layers=None if drafts is None else self._drafting_layers(drafts),
        )

    def run_layers(
        self,
        x: Activations,
        positions: Int[Array, " T"],
        *,
        attend: attention.Attend,
        caches: Sequence[jax.Array | None],
        valid: Bool[Array, " T"] | None = None,
        feed_forward: FeedForward = run_feed_forward,
        layers: Sequence[RunLayer] | None = None,
    ) -> tuple[Activations, list[jax.Array | None]]:
        """Returns what `__call__` returns, for the embeddings `x` of the tokens.

        This is the only loop over layers. A caller that needs the choices of the routers, or
        another form of the experts, passes its own `feed_forward`. The loop calls it once per
        layer, in order. `layers` are other forms of the model's own.
        """
        angles = self.angles(positions)
        pending, new_caches = (), []
        for layer, cache in zip(self.layers if layers is None else layers, caches, strict=True):
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
        if not pending:
            return self.norm(x), new_caches
        return self.norm.add(x, pending, implementation=self.ops)[1], new_caches

    def _drafting_layers(self, drafts: Bool[Array, " T"]) -> list[RunLayer]:
        found: list[RunLayer] = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer), "no other layer has an adapter"
            found.append(functools.partial(layer, drafts=drafts))
        return found

    def embed(self, tokens: Int[Array, " T"], positions: Int[Array, " T"]) -> Activations:
        """Returns the embeddings of tokens."""
        if self.hash_embedding_positions:
            tokens = _hash_rows(tokens, positions, self.config.spec.vocab_size)
        return jnp.take(self.word_embeddings[...], tokens, axis=0, mode="clip")

    def mix(self, weights: Float[Array, "T V"]) -> Activations:
        """Returns the embeddings of mixtures of tokens; `weights` holds the share of each token."""
        return weights @ self.word_embeddings[...]

    def angles(self, positions: Int[Array, " T"]) -> Angles:
        """Returns the rotation for every RoPE config of the layers."""
        kinds = dict.fromkeys(layer.attention.rope for layer in self.config.layers)
        return {kind: rope.rotation(positions, kind) for kind in kinds}

    def unembedding(self) -> unembedding.LMHead:
        """Returns the LM head: its own array, or the embedding if they are tied."""
        weight = (self.word_embeddings if self.lm_head is None else self.lm_head)[...]
        return unembedding.LMHead(weight=weight, num_ranks=self.config.shards.tp)

    def logits(self, hidden: Activations) -> Float32[Array, "T V"]:
        """Returns the logits; for training and oracles, not for serving."""
        return self.unembedding().logits(hidden)


def _post_norm(
    config: decoder_config.LayerConfig, *, eps: float, dtype: jnp.dtype, num_ranks: int
) -> norm.RMSNorm | None:
    dim = config.attention.dim
    if not config.has_post_norms:
        return None
    return norm.RMSNorm(dim, eps=eps, dtype=dtype, num_ranks=num_ranks)


def _normalised(
    post_norm: norm.RMSNorm | None, parts: tuple[Activations, ...]
) -> tuple[Activations, ...]:
    """Returns the output of a sub-layer: its parts, or the norm of their sum."""
    return parts if post_norm is None else (post_norm.of_sum(parts),)


def _hash_rows(
    tokens: Int[Array, " T"], positions: Int[Array, " T"], vocab_size: int
) -> Int[Array, " T"]:
    token_mix, position_mix, last_mix = jnp.array(_HASH_MULTIPLIERS, jnp.uint32)
    mixed = tokens.astype(jnp.uint32) * token_mix + positions.astype(jnp.uint32) * position_mix
    mixed = (mixed ^ (mixed >> 15)) * last_mix
    return ((mixed ^ (mixed >> 13)) % jnp.uint32(vocab_size)).astype(jnp.int32)
