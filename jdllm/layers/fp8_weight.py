"""The weight of a product in 8-bit floats, in the place of a parameter [out, in].

Each output channel has a scale. Activations are quantised in each product, every token with a scale
of its own, so a token is the same alone and among others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

import pallas_kernels
from jdllm.device import sharding


class Fp8Weight(nnx.Module):
    """Stands for the weight `values * scale[:, None]`: values in e4m3 [F, D], scale in float32."""

    def __init__(self, shape: tuple[int, ...]):
        self.values = nnx.Param(jnp.zeros(shape, jnp.float8_e4m3fn))
        self.scale = nnx.Param(jnp.ones(shape[:1], jnp.float32))

    def product(
        self,
        x: Float[Array, "... D"],
        *,
        out_dtype: jnp.dtype | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "... F"]:
        """Returns `x @ weight.T` over the last axis, by default in the dtype of `x`.

        With an `axis_name`, each rank has a part of D, and its part of the sum is returned.
        """
        rows = x.reshape(-1, x.shape[-1])
        out = pallas_kernels.fp8_matmul(
            rows, self.values[...], self.scale[...], out_dtype=out_dtype, axis_name=axis_name
        )
        return out.reshape(*x.shape[:-1], -1)


def quantized(path: str, weight: Float[Array, "F D"]) -> dict[str, jax.Array]:
    """Returns the parameters of an `Fp8Weight` in the place of the parameter at a path."""
    values, scale = pallas_kernels.quantize_rows(weight)
    return {f"{path}.values": values, f"{path}.scale": scale}


def quantized_parts(
    path: str, parts: Float[Array, "tp F D"], how: sharding.Cut, mesh: Mesh
) -> dict[str, jax.Array]:
    """Returns the parts of `quantized` of the whole weight, whose parts lie on a mesh.

    A rank with a part of each row has the scales of whole rows.
    """
    has_whole_rows = how.axis == 0
    axis_name = None if has_whole_rows else sharding.AXIS

    def of_rank(part: Float[Array, "1 F D"]) -> tuple[jax.Array, jax.Array]:
        values, scale = pallas_kernels.quantize_rows(part[0], axis_name=axis_name)
        return values[None], scale[None] if has_whole_rows else scale

    of_scale = sharding.SPLIT if has_whole_rows else sharding.REPLICATED
    values, scale = jax.shard_map(
        of_rank,
        mesh=mesh,
        in_specs=sharding.SPLIT,
        out_specs=(sharding.SPLIT, of_scale),
        check_vma=False,
    )(parts)
    return {f"{path}.values": values, f"{path}.scale": scale}
