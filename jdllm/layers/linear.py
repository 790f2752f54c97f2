"""A linear layer with a bias; its weight is [out, in], as checkpoints have it."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Linear(nnx.Module):
    """Computes `x @ weight.T + bias` over the last axis."""

    def __init__(self, num_inputs: int, num_outputs: int, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((num_outputs, num_inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((num_outputs,), dtype))

    def __call__(
        self, x: Float[Array, "... D"], *, out_dtype: jnp.dtype | None = None
    ) -> Float[Array, "... F"]:
        """Returns the result in `out_dtype`, by default that of `x` and the weight together."""
        out = jnp.einsum("...D,FD->...F", x, self.weight[...], preferred_element_type=out_dtype)
        return out + self.bias[...].astype(out.dtype)
