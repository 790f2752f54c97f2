"""LLaDA and Dream: decoders of dense layers that see the whole sequence, no norms of q and k.

They differ by constants and by a bias on q, k and v (`DenseConfig`); that Dream's logit
row i predicts position i + 1 is a fact of the spec, not of the forward pass.
"""

from __future__ import annotations

import jax.numpy as jnp

from jdllm.layers import mlp, moe
from jdllm.models import decoder, decoder_config


class DenseDecoder(decoder.Decoder):
    """The decoder of one dense model; see `decoder.Decoder`."""

    def __init__(
        self,
        config: decoder_config.DenseConfig,
        *,
        dtype: jnp.dtype,
        implementation: str = "auto",
        hash_embedding_positions: bool = False,
    ):
        width = config.intermediate_size
        super().__init__(
            config,
            lambda _: mlp.DenseMLP(
                config.hidden_size,
                width,
                dtype=dtype,
                implementation=moe.ops_around_experts(implementation),
            ),
            qk_norm_eps=None,
            has_qkv_bias=config.has_qkv_bias,
            dtype=dtype,
            implementation=implementation,
            hash_embedding_positions=hash_embedding_positions,
        )
