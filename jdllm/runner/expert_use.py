"""How many experts tokens reach: random weights say nothing about speed unless routing spreads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.layers import attention, moe
from jdllm.models import loading


def distinct_experts(model: loading.LoadedModel, tokens: np.ndarray) -> list[int]:
    """Returns how many experts one block of `tokens` [T] reaches in each MoE layer, [] if dense."""

    def forward(params: dict[str, jax.Array], tokens: jax.Array) -> list[jax.Array]:
        module = loading.merge(model.graphdef, params)
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        x, angles = module.embed(tokens, positions), module.angles(positions)
        attend = attention.dense_attend(np.ones((len(tokens), len(tokens)), bool), 1)
        chosen = []
        for layer in module.layers:
            out, _ = layer.attention(layer.input_layernorm(x), angles, attend=attend, cache=None)
            x = x + sum(out)
            h = layer.post_attention_layernorm(x)
            if isinstance(layer.mlp, moe.SparseMoE):
                chosen.append(layer.mlp.router(h)[0])
                x = x + layer.mlp(h)
            else:
                x = x + sum(layer.mlp(h))
        return chosen

    return [len(np.unique(ids)) for ids in jax.jit(forward)(model.params, tokens)]
