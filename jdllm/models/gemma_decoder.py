"""The decoder of DiffusionGemma: Gemma 4's layers, run as an encoder of context and as a denoiser.

A layer has a dense and a routed feed-forward side by side, and a norm after every part. Both passes
share all weights but one number per layer, by which the layer's output is multiplied. The encoder
sees its context causally, and only its K,V are used. The denoiser reads a canvas together with the
mixture of embeddings that it expected in the step before (self-conditioning); logits are capped.

Source of the formulas: transformers 5.23, `models/diffusion_gemma`, and Gemma 4's text model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

import pallas_kernels
from jdllm.layers import attention, mlp, moe, norm, unembedding
from jdllm.models import decoder, decoder_config

Activations = decoder.Activations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(decoder_config.DecoderConfig):
    """A DiffusionGemma model; the feed-forwards of its layers' configs are the routed ones.

    `dense` is the other feed-forward of every layer, and that of self-conditioning.
    """

    logit_softcap: float

    @property
    def dense_mlp(self) -> mlp.MLPConfig:
        """`dense`, which every config of this class has."""
        assert self.dense is not None, "the family's configs have a dense feed-forward"
        return self.dense


class GemmaRouter(moe.Router):
    """Chooses experts for the residual stream, which it normalises itself."""

    def __init__(
        self, dim: int, config: moe.RouterConfig, *, eps: float, dtype: jnp.dtype, ops: str
    ):
        super().__init__(dim, config, implementation=ops)
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.per_expert_scale = nnx.Param(jnp.ones((config.num_experts,), jnp.float32))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
        scale = self.scale[...].astype(jnp.float32) * x.shape[1] ** -0.5
        ids, weights = super().__call__(pallas_kernels.rms_norm(x, scale, self.eps))
        return ids, weights * self.per_expert_scale[...][ids]


class GemmaMoE(moe.SparseMoE):
    """The routed feed-forward of the residual stream, with its own norms before and after."""

    def __init__(
        self,
        dim: int,
        config: moe.MoEConfig,
        *,
        eps: float,
        dtype: jnp.dtype,
        implementation: str,
        num_ranks: int,
    ):
        super().__init__(dim, config, dtype=dtype, implementation=implementation)
        ops = moe.ops_around_experts(implementation)
        self.router = GemmaRouter(dim, config.router, eps=eps, dtype=dtype, ops=ops)
        self.pre_norm = norm.RMSNorm(dim, eps=eps, dtype=dtype)
        self.post_norm = norm.RMSNorm(dim, eps=eps, dtype=dtype, num_ranks=num_ranks)

    def __call__(
        self, x: Float[Array, "T D"], *, valid: Bool[Array, " T"] | None = None
    ) -> Float[Array, "T D"]:
        with jax.named_scope("router"):
            ids, weights = self.router(x)
        return self.post_norm.of_sum((self.sum_of_experts(self.pre_norm(x), ids, weights, valid),))


class GemmaLayer(nnx.Module):
    """Attention, then both feed-forwards; a norm follows each part before its addition.

    The norms after attention and after each feed-forward sum the parts of all ranks first.
    `layer_scalar` and `encoder_scalar` [1] multiply the output of the two passes.
    """

    def __init__(
        self,
        config: decoder_config.LayerConfig,
        dense: mlp.MLPConfig,
        *,
        eps: float,
        dtype: jnp.dtype,
        implementation: str,
        num_ranks: int,
    ):
        dim, ops = config.attention.dim, moe.ops_around_experts(implementation)
        assert isinstance(config.feed_forward, moe.MoEConfig), "every layer of Gemma has experts"
        new_norm = functools.partial(norm.RMSNorm, dim, eps=eps, dtype=dtype)
        self.input_layernorm, self.mlp_pre_norm = new_norm(), new_norm()
        self.attention_post_norm = new_norm(num_ranks=num_ranks)
        self.mlp_post_norm = new_norm(num_ranks=num_ranks)
        self.feed_forward_post_norm = new_norm()
        self.attention = attention.Attention(config.attention, dtype=dtype, implementation=ops)
        self.mlp = mlp.DenseMLP(
            dim, dense.width, dtype=dtype, activation=dense.activation, implementation=ops
        )
        self.moe = GemmaMoE(
            dim,
            config.feed_forward,
            eps=eps,
            dtype=dtype,
            implementation=implementation,
            num_ranks=num_ranks,
        )
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))
        self.encoder_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(
        self,
        x: Activations,
        pending: tuple[Activations, ...],
        angles: decoder.Angles,
        *,
        attend: attention.Attend,
        cache: jax.Array | None,
        valid: Bool[Array, " T"] | None = None,
        feed_forward: decoder.FeedForward = decoder.run_feed_forward,
        encodes: bool = False,
    ) -> tuple[Activations, tuple[Activations, ...], jax.Array | None]:
        """Returns the residual stream, which lacks nothing, and the new cache."""
        assert not pending, "a layer of this class leaves no addition to the next one"
        h = self.input_layernorm(x)
        rope = self.attention.config.rope
        out, cache = self.attention(h, angles[rope], attend=attend, cache=cache)
        x = x + self.attention_post_norm.of_sum(out)
        dense = self.mlp_post_norm.of_sum(feed_forward(self.mlp, self.mlp_pre_norm(x), valid))
        routed = functools.reduce(jnp.add, feed_forward(self.moe, x, valid))
        x = x + self.feed_forward_post_norm(dense + routed)
        scalar = self.encoder_scalar if encodes else self.layer_scalar
        return x * scalar[...], (), cache


class SelfConditioning(nnx.Module):
    """Adds what the step before expected to the embeddings of a canvas, and normalises the sum."""

    def __init__(
        self,
        dim: int,
        config: mlp.MLPConfig,
        *,
        eps: float,
        dtype: jnp.dtype,
        ops: str,
        num_ranks: int,
    ):
        self.eps = eps
        self.num_ranks = num_ranks
        self.pre_norm = norm.RMSNorm(dim, eps=eps, dtype=dtype)
        self.mlp = mlp.DenseMLP(
            dim, config.width, dtype=dtype, activation=config.activation, implementation=ops
        )

    def __call__(
        self, embeddings: Float[Array, "T D"], expected: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        """`expected` is 0 in the first step of a canvas, and then adds nothing."""
        parts = norm.sum_of_parts(self.mlp(self.pre_norm(expected)), self.num_ranks)
        total = embeddings + functools.reduce(jnp.add, parts)
        return pallas_kernels.rms_norm(total, jnp.ones((total.shape[1],), total.dtype), self.eps)


class GemmaDecoder(decoder.Decoder):
    """`encode` writes K,V of context, `denoise` reads a canvas; a plain call is the encoder's."""

    config: GemmaConfig

    def __init__(
        self, config: GemmaConfig, *, dtype: jnp.dtype, implementation: str = "auto", **options: Any
    ):
        super().__init__(config, dtype=dtype, implementation=implementation, **options)
        self.self_conditioning = SelfConditioning(
            config.spec.hidden_size,
            config.dense_mlp,
            eps=config.rms_norm_eps,
            dtype=dtype,
            ops=self.ops,
            num_ranks=config.shards.tp,
        )

    def build_layer(
        self, layer: decoder_config.LayerConfig, *, dtype: jnp.dtype, implementation: str
    ) -> GemmaLayer:
        return GemmaLayer(
            layer,
            self.config.dense_mlp,
            eps=self.config.rms_norm_eps,
            dtype=dtype,
            implementation=implementation,
            num_ranks=self.config.shards.tp,
        )

    def run_layers(
        self,
        x: Activations,
        positions: Int[Array, " T"],
        *,
        attend: attention.Attend,
        caches: Sequence[jax.Array | None],
        valid: Bool[Array, " T"] | None = None,
        feed_forward: decoder.FeedForward = decoder.run_feed_forward,
        layers: Sequence[decoder.RunLayer] | None = None,
    ) -> tuple[Activations, list[jax.Array | None]]:
        """Runs the layers as the encoder does, unless `layers` says otherwise."""
        return super().run_layers(
            x,
            positions,
            attend=attend,
            caches=caches,
            valid=valid,
            feed_forward=feed_forward,
            layers=self._encoder_layers() if layers is None else layers,
        )

    def denoise(
        self,
        canvas: Int[Array, " T"],
        expected: Float[Array, "T D"],
        positions: Int[Array, " T"],
        *,
        attend: attention.Attend,
        caches: Sequence[jax.Array | None],
        valid: Bool[Array, " T"] | None = None,
    ) -> tuple[Activations, list[jax.Array | None]]:
        """Returns the hidden states of canvas tokens after the final norm, and the caches.

        `expected` is the mixture of embeddings (`mix`) that the step before predicted for each
        position, 0 in the first step.
        """
        x = self.self_conditioning(self.embed(canvas, positions), expected)
        return self.run_layers(
            x, positions, attend=attend, caches=caches, valid=valid, layers=list(self.layers)
        )

    def embed(self, tokens: Int[Array, " T"], positions: Int[Array, " T"]) -> Activations:
        """Returns the embeddings of tokens, scaled."""
        return super().embed(tokens, positions) * self._embedding_scale

    def mix(self, weights: Float[Array, "T V/num_ranks"]) -> Activations:
        """Returns the scaled embeddings of mixtures of tokens, in the dtype of the model.

        `weights` are the shares of the tokens that this rank's part of the head has.
        """
        head = self.unembedding()  # it is the embedding, too
        parts = (weights.astype(head.weight.dtype) @ head.weight,)
        (mixture,) = norm.sum_of_parts(parts, head.num_ranks)
        return mixture * self._embedding_scale

    def unembedding(self) -> unembedding.LMHead:
        """Returns the LM head, which is the embedding, with its cap."""
        return dataclasses.replace(super().unembedding(), softcap=self.config.logit_softcap)

    def _encoder_layers(self) -> list[decoder.RunLayer]:
        found: list[decoder.RunLayer] = []
        for layer in self.layers:
            assert isinstance(layer, GemmaLayer), "`build_layer` makes no other"
            found.append(functools.partial(layer, encodes=True))
        return found

    @property
    def _embedding_scale(self) -> Array:
        # Rounded to the dtype of the model, as the reference has it.
        dtype = self.word_embeddings[...].dtype
        return jnp.asarray(self.config.spec.hidden_size**0.5, dtype)
