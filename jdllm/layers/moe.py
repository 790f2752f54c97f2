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
from jdllm.layers import mlp


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Routing constants; `num_groups` 1 means no group limit."""

    num_experts: int
    experts_per_token: int
    num_groups: int
    kept_groups: int
    scaling_factor: float


def route(
    router_logits: jax.Array, expert_bias: jax.Array, config: RouterConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns (expert ids int32 [T, k], weights float32 [T, k]) by descending score.

    The bias selects experts but does not weigh them; equal scores go to the lower id.
    """
    scores = jax.nn.sigmoid(router_logits)  # [T, E]
    choice = scores + expert_bias
    if config.num_groups > 1:
        choice = _keep_best_groups(choice, config)
    _, ids = jax.lax.top_k(choice, config.experts_per_token)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * config.scaling_factor


def _keep_best_groups(choice: jax.Array, config: RouterConfig) -> jax.Array:
    groups = choice.reshape(choice.shape[0], config.num_groups, -1)
    group_score = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)  # [T, groups]
    _, kept = jax.lax.top_k(group_score, config.kept_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(config.num_groups), axis=1)
    # -inf, not 0: an expert with a negative bias must not resurrect a dropped group.
    return jnp.where(is_kept[:, :, None], groups, -jnp.inf).reshape(choice.shape)


class Router(nnx.Module):
    """Scores every expert for every token; its arrays are float32 in every model dtype."""

    def __init__(self, dim: int, config: RouterConfig):
        self.config = config
        self.weight = nnx.Param(jnp.zeros((dim, config.num_experts), jnp.float32))
        self.expert_bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns float32 router logits [T, E]."""
        return jnp.matmul(
            x.astype(jnp.float32), self.weight[...], precision=jax.lax.Precision.HIGHEST
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return route(self.logits(x), self.expert_bias[...], self.config)


class Experts(nnx.Module):
    """Routed SwiGLU experts in the layout of `pallas_kernels.grouped_matmul`."""

    def __init__(self, dim: int, width: int, num_experts: int, *, dtype: jnp.dtype):
        self.w_gate_up = nnx.Param(jnp.zeros((num_experts, 2 * width, dim), dtype))
        self.w_down = nnx.Param(jnp.zeros((num_experts, dim, width), dtype))


class SparseMoE(nnx.Module):
    """Adds the routed experts' weighted sum and the unscaled shared expert."""

    def __init__(
        self,
        dim: int,
        width: int,
        shared_width: int,
        *,
        router: RouterConfig,
        dtype: jnp.dtype,
        implementation: str,
    ):
        self.implementation = implementation
        self.router = Router(dim, router)
        self.experts = Experts(dim, width, router.num_experts, dtype=dtype)
        self.shared_experts = mlp.DenseMLP(dim, shared_width, dtype=dtype) if shared_width else None

    def __call__(self, x: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
        ids, weights = self.router(x)
        routed = pallas_kernels.grouped_matmul(
            x,
            self.experts.w_gate_up[...],
            self.experts.w_down[...],
            ids,
            weights,
            valid=valid,
            implementation=self.implementation,
        ).astype(x.dtype)
        if self.shared_experts is None:
            return routed
        return routed + self.shared_experts(x)
