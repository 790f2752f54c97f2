"""The dense SwiGLU feed-forward layer, also used for the shared expert of an MoE."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class DenseMLP(nnx.Module):
    """Computes `down(silu(gate(x)) * up(x))`; `w_gate_up` [D, 2F] holds gate first."""

    def __init__(self, dim: int, width: int, *, dtype: jnp.dtype):
        self.w_gate_up = nnx.Param(jnp.zeros((dim, 2 * width), dtype))
        self.w_down = nnx.Param(jnp.zeros((width, dim), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            gate, up = jnp.split(x @ self.w_gate_up[...], 2, axis=-1)
            return (jax.nn.silu(gate) * up) @ self.w_down[...]
