"""Sparse feed-forward layer: group-limited sigmoid router, routed and shared experts.

The router is float32 throughout, product included: with a lower-precision
product tokens flip experts and the logits move by whole units.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Routing constants; `num_groups` 1 means no group limit."""

    num_experts: int
    experts_per_token: int
    num_groups: int
    kept_groups: int
    scaling_factor: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Widths of the experts, and how tokens find them; `shared_width` 0 means no shared expert."""

    width: int
    shared_width: int
    router: RouterConfig


class Router(nnx.Module):
    """Scores every expert for every token, in float32 in every model dtype.

    `weight` is float32 [D, E], or bfloat16 [D, 3 * E] from `split_router_weight`.
    """

    def __init__(self, dim: int, config: RouterConfig, *, implementation: str = "auto"):
        self.config = config
        self.implementation = implementation
        self.weight = nnx.Param(jnp.zeros((dim, config.num_experts), jnp.float32))
        self.expert_bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns float32 router logits [T, E]."""
        weight = self.weight[...]
        if weight.dtype != jnp.bfloat16:
            return jnp.matmul(x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
        parts = jnp.matmul(x, weight, preferred_element_type=jnp.float32)  # [T, 3 * E]
        return jnp.sum(parts.reshape(x.shape[0], 3, -1), axis=1)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (expert ids int32 [T, k], weights float32 [T, k]) by descending score."""
        return pallas_kernels.top_k_routing(
            self.logits(x),
            self.expert_bias[...],
            experts_per_token=self.config.experts_per_token,
            num_groups=self.config.num_groups,
            kept_groups=self.config.kept_groups,
            scaling_factor=self.config.scaling_factor,
            implementation=self.implementation,
        )


def ops_around_experts(implementation: str) -> str:
    """Returns what the ops around the experts use: "dense" asks for differentiable ones, XLA's."""
    return "xla" if implementation == "dense" else implementation


def split_router_weight(weight: jax.Array) -> jax.Array:
    """Returns the bfloat16 form [D, 3 * E] of a float32 router weight, for bfloat16 models.

    Three bfloat16 numbers hold the 24 bits of a float32, and products of bfloat16 are exact in
    float32, so logits from the parts differ from a float32 matmul by the order of the sum alone.
    That one runs without tensor cores: 58 us for 2048 tokens on an H200. Splitting in the step
    would cost as much as the matmul, hence once at load (`loading.serving_params`).
    """
    high = _rounded_to_bfloat16(weight)
    middle = _rounded_to_bfloat16(weight - high)
    low = weight - high - middle
    return jnp.concatenate([high, middle, low], axis=1).astype(jnp.bfloat16)


def _rounded_to_bfloat16(x: jax.Array) -> jax.Array:
    # Not a cast there and back: XLA may leave such a pair out as excess precision.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


class Experts(nnx.Module):
    """Routed SwiGLU experts in the layout of `pallas_kernels.grouped_matmul`."""

    def __init__(self, dim: int, width: int, num_experts: int, *, dtype: jnp.dtype):
        self.w_gate_up = nnx.Param(jnp.zeros((num_experts, 2 * width, dim), dtype))
        self.w_down = nnx.Param(jnp.zeros((num_experts, dim, width), dtype))


class SharedExpert(nnx.Module):
    """The expert of every token, in the layout of the routed ones; it may be wider."""

    def __init__(self, dim: int, width: int, *, dtype: jnp.dtype):
        self.w_gate_up = nnx.Param(jnp.zeros((2 * width, dim), dtype))
        self.w_down = nnx.Param(jnp.zeros((dim, width), dtype))


class SparseMoE(nnx.Module):
    """Adds the routed experts' weighted sum and the unscaled shared expert."""

    def __init__(self, dim: int, config: MoEConfig, *, dtype: jnp.dtype, implementation: str):
        self.implementation = implementation
        self.router = Router(dim, config.router, implementation=ops_around_experts(implementation))
        self.experts = Experts(dim, config.width, config.router.num_experts, dtype=dtype)
        self.shared_experts = (
            SharedExpert(dim, config.shared_width, dtype=dtype) if config.shared_width else None
        )

    def __call__(self, x: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
        with jax.named_scope("router"):
            ids, weights = self.router(x)
        shared = self.shared_experts
        with jax.named_scope("experts"):
            return pallas_kernels.grouped_matmul(
                x,
                self.experts.w_gate_up[...],
                self.experts.w_down[...],
                ids,
                weights,
                shared=None if shared is None else (shared.w_gate_up[...], shared.w_down[...]),
                valid=valid,
                implementation=self.implementation,
                out_dtype=x.dtype,
            )
