"""Products with weights [out, in], as checkpoints have them, and a linear layer with a bias.

A weight is a parameter in the dtype of the model, or quantised (`fp8_weight.Fp8Weight`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jdllm.device import sharding
from jdllm.layers import fp8_weight, norm

Weight = nnx.Param[jax.Array] | fp8_weight.Fp8Weight  # [F, D]


def product(
    x: Float[Array, "... D"],
    weight: Weight,
    *,
    out_dtype: jnp.dtype | None = None,
    axis_name: str | None = None,
) -> Float[Array, "... F"]:
    """Returns `x @ weight.T` over the last axis in `out_dtype`.

    It is by default the dtype of `x` and the weight together; of `x`, if the weight is quantised.
    With an `axis_name`, each rank has a part of D, and its part of the sum is returned.
    """
    if isinstance(weight, fp8_weight.Fp8Weight):
        return weight.product(x, out_dtype=out_dtype, axis_name=axis_name)
    return jnp.einsum("...D,FD->...F", x, weight[...], preferred_element_type=out_dtype)


def summed_product(
    x: Float[Array, "... D"],
    weight: Weight,
    num_ranks: int,
    *,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "... F"]:
    """Returns `product`, or with several ranks its sum over them: each has a part of D."""
    if num_ranks == 1:
        return product(x, weight, out_dtype=out_dtype)
    out = product(x, weight, out_dtype=out_dtype, axis_name=sharding.AXIS)
    (rows,) = norm.sum_of_parts((out.reshape(-1, out.shape[-1]),), num_ranks)
    return rows.reshape(out.shape)


class Linear(nnx.Module):
    """Computes `x @ weight.T + bias` over the last axis.

    With `num_ranks`, it runs in a shard_map, `num_inputs` are those of one rank, and the product is
    summed over the ranks.
    """

    weight: Weight

    def __init__(self, num_inputs: int, num_outputs: int, *, dtype: jnp.dtype, num_ranks: int = 1):
        self.num_ranks = num_ranks
        self.weight = nnx.Param(jnp.zeros((num_outputs, num_inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((num_outputs,), dtype))

    def __call__(
        self, x: Float[Array, "... D"], *, out_dtype: jnp.dtype | None = None
    ) -> Float[Array, "... F"]:
        """Returns the result in `out_dtype`, by default that of `product`."""
        out = summed_product(x, self.weight, self.num_ranks, out_dtype=out_dtype)
        return out + self.bias[...].astype(out.dtype)
