"""The dense gated feed-forward layer: SwiGLU, or GeGLU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """The width of one dense feed-forward, and what its gate is put through."""

    width: int
    activation: pallas_kernels.Activation = "silu"


class DenseMLP(nnx.Module):
    """Computes `down(activation(gate(x)) * up(x))`; `w_gate_up` [2F, D] holds gate first."""

    def __init__(
        self,
        dim: int,
        width: int,
        *,
        dtype: jnp.dtype,
        activation: pallas_kernels.Activation = "silu",
        implementation: str = "auto",
    ):
        self.activation: pallas_kernels.Activation = activation
        self.implementation = implementation
        self.w_gate_up = nnx.Param(jnp.zeros((2 * width, dim), dtype))
        self.w_down = nnx.Param(jnp.zeros((dim, width), dtype))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], ...]:
        """Returns arrays whose sum is the output for `x`."""
        with jax.named_scope("mlp"):
            h = self._gated(x)
            return pallas_kernels.dense_matmul(
                h, self.w_down[...], implementation=self.implementation
            )

    def _gated(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        weight, implementation = self.w_gate_up[...], self.implementation
        if self.activation == "silu":
            return pallas_kernels.swiglu_matmul(x, weight, implementation=implementation)
        parts = pallas_kernels.dense_matmul(x, weight, implementation=implementation)
        gate, up = jnp.split(functools.reduce(jnp.add, parts), 2, axis=-1)
        return pallas_kernels.ACTIVATIONS[self.activation](gate) * up
