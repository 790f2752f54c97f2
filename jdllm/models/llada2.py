"""LLaDA2 (2.0 and 2.1, MoE): leading dense layers, then routed ones; norms of q and k."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jdllm.layers import mlp, moe
from jdllm.models import decoder
from jdllm.models.families import llada2


class LLaDA2(decoder.Decoder):
    """The decoder of one LLaDA2 model; see `decoder.Decoder`."""

    def __init__(
        self,
        config: llada2.LLaDA2Config,
        *,
        dtype: jnp.dtype,
        implementation: str = "auto",
        hash_embedding_positions: bool = False,
    ):
        super().__init__(
            config,
            functools.partial(_feed_forward, config, dtype=dtype, implementation=implementation),
            qk_norm_eps=config.rms_norm_eps,
            has_qkv_bias=False,
            dtype=dtype,
            implementation=implementation,
            hash_embedding_positions=hash_embedding_positions,
        )


def router_config(config: llada2.LLaDA2Config) -> moe.RouterConfig:
    """Returns the routing constants of every MoE layer."""
    return moe.RouterConfig(
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        num_groups=config.num_groups,
        kept_groups=config.kept_groups,
        scaling_factor=config.routed_scaling_factor,
    )


def _feed_forward(
    config: llada2.LLaDA2Config, layer: int, *, dtype: jnp.dtype, implementation: str
) -> mlp.DenseMLP | moe.SparseMoE:
    if not config.is_moe_layer(layer):
        return mlp.DenseMLP(
            config.hidden_size,
            config.intermediate_size,
            dtype=dtype,
            implementation=moe.ops_around_experts(implementation),
        )
    return moe.SparseMoE(
        config.hidden_size,
        config.moe_intermediate_size,
        config.shared_intermediate_size,
        router=router_config(config),
        dtype=dtype,
        implementation=implementation,
    )
