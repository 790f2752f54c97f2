"""The dense SwiGLU feed-forward layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """The width of one dense feed-forward."""

    width: int


class DenseMLP(nnx.Module):
    """Computes `down(silu(gate(x)) * up(x))`; `w_gate_up` [2F, D] holds gate first."""

    def __init__(self, dim: int, width: int, *, dtype: jnp.dtype, implementation: str = "auto"):
        self.implementation = implementation
        self.w_gate_up = nnx.Param(jnp.zeros((2 * width, dim), dtype))
        self.w_down = nnx.Param(jnp.zeros((dim, width), dtype))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], ...]:
        """Returns arrays whose sum is the output for `x`."""
        with jax.named_scope("mlp"):
            h = pallas_kernels.swiglu_matmul(
                x, self.w_gate_up[...], implementation=self.implementation
            )
            return pallas_kernels.dense_matmul(
                h, self.w_down[...], implementation=self.implementation
            )
