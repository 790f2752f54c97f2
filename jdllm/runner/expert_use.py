"""Counts the experts that tokens reach: with random weights a measured speed means something only
if the routing spreads over the experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jdllm.layers import attention, moe
from jdllm.models import decoder, loading
from jdllm.runner.launch import over_mesh


def distinct_experts(model: loading.LoadedModel, tokens: Int[np.ndarray, " T"]) -> list[int]:
    """Returns how many experts one block of `tokens` reaches in each MoE layer, [] if dense."""

    mask = np.ones((len(tokens), len(tokens)), bool)
    found = (layer.attention.window for layer in model.config.layers)
    windows = {window for window in found if window is not None}

    def forward(params: loading.Params, tokens: Int[Array, " T"]) -> list[Int[Array, "T k"]]:
        chosen = []

        def feed_forward(mlp, x, valid):
            if isinstance(mlp, moe.SparseMoE):
                chosen.append(mlp.router(x)[0])
            return decoder.run_feed_forward(mlp, x, valid)

        loading.apply(
            model.graphdef,
            params,
            tokens,
            jnp.arange(tokens.shape[0], dtype=jnp.int32),
            attend=attention.dense_attend(mask, 1, of_windows=dict.fromkeys(windows, mask)),
            caches=[None] * model.spec.num_layers,
            feed_forward=feed_forward,
        )
        return chosen

    mesh = over_mesh.mesh_of(model.params)
    if mesh is None:
        chosen = jax.jit(forward)(model.params, tokens)
    else:  # the router is whole on every rank
        everywhere = over_mesh.on_every_rank(
            lambda params, memory, tokens: (memory, forward(params, tokens)), model.params, {}, mesh
        )
        _, chosen = jax.jit(everywhere)(model.params, {}, tokens)
    return [len(np.unique(ids)) for ids in chosen]
