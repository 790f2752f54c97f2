"""A product of low rank that some tokens add to a linear layer's: an adapter (LoRA).

The layer's weight W and the adapter stay apart, since one forward computes tokens with the adapter
beside tokens without it. A token with it has `x @ (W + scale * up @ down).T` (Hu et al. 2021,
arXiv:2106.09685).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowRankConfig:
    """The rank of an adapter, and what its product is multiplied by."""

    rank: int
    scale: float


class LowRank(nnx.Module):
    """`down` [r, D] and `up` [F, r], as checkpoints have them.

    Where each rank of a mesh has a part of D, its result is its part of the sum.
    """

    def __init__(
        self, config: LowRankConfig, num_inputs: int, num_outputs: int, *, dtype: jnp.dtype
    ):
        self.config = config
        self.down = nnx.Param(jnp.zeros((config.rank, num_inputs), dtype))
        self.up = nnx.Param(jnp.zeros((num_outputs, config.rank), dtype))

    def __call__(self, x: Float[Array, "T D"], is_used: Bool[Array, " T"]) -> Float[Array, "T F"]:
        """Returns what the adapter adds, in the dtype of `x`: 0 for tokens that do not use it."""
        inner = jnp.einsum("TD,rD->Tr", x, self.down[...], preferred_element_type=jnp.float32)
        inner = (inner * self.config.scale).astype(x.dtype)
        found = inner @ self.up[...].T.astype(x.dtype)
        return jnp.where(is_used[:, None], found, 0)  # also where a weight is not finite
