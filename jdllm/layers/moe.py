"""Sparse feed-forward layer: router (sigmoid with a limit, or softmax), routed and shared experts.

The limit is either DeepSeek-V3's on the groups that a token reaches, or LLaDA2.2's on the experts
that a whole diffusion block reaches (block routing): the `capacity` experts with the highest score
of any token of the block. A block then reads few experts, whatever its tokens want.

The router computes in float32, its matmul included: with a matmul of lower precision some
tokens reach other experts, and the model's logits move by whole units.

Letters: those of the whole project, and k experts of a token.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

import pallas_kernels
from jdllm.device import sharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Routing constants; `num_groups` 1 means no group limit.

    `pallas_kernels.top_k_routing` says what they mean. With `has_bias`, a bias takes part in the
    choice of experts. `block_capacity`: the experts that a block of `block_size` tokens reaches;
    0 means no limit. The limit of blocks is for sigmoid scores with a bias and without groups.
    """

    num_experts: int
    experts_per_token: int
    num_groups: int = 1
    kept_groups: int = 1
    scaling_factor: float = 1.0
    scores: Literal["sigmoid", "softmax"] = "sigmoid"
    renormalizes: bool = True
    has_bias: bool = True
    block_size: int = 0
    block_capacity: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Widths of the experts, and their router; `shared_width` 0 means no shared expert.

    With `num_ranks`, expert e is on rank e % num_ranks, as its expert e // num_ranks. Gates are put
    through `activation`.
    """

    width: int
    shared_width: int
    router: RouterConfig
    num_ranks: int = 1
    activation: pallas_kernels.Activation = "silu"


class Router(nnx.Module):
    """Scores every expert for every token, in float32 whatever the model's dtype.

    `weight` is float32 [D, E], or bfloat16 [D, 3 * E] from `split_router_weight`.
    """

    def __init__(self, dim: int, config: RouterConfig, *, implementation: str = "auto"):
        self.config = config
        self.implementation = implementation
        self.weight = nnx.Param(jnp.zeros((dim, config.num_experts), jnp.float32))
        bias = jnp.zeros((config.num_experts,), jnp.float32)
        self.expert_bias = nnx.Param(bias) if config.has_bias else None

    def logits(self, x: Float[Array, "T D"]) -> Float32[Array, "T E"]:
        """Returns the router logits."""
        weight = self.weight[...]
        if weight.dtype != jnp.bfloat16:
            return jnp.matmul(x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
        parts = jnp.matmul(x, weight, preferred_element_type=jnp.float32)  # [T, 3 * E]
        return jnp.sum(parts.reshape(x.shape[0], 3, -1), axis=1)

    def __call__(
        self, x: Float[Array, "T D"], valid: Bool[Array, " T"] | None = None
    ) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
        """Returns (expert ids, weights) of each token, by descending score.

        With a limit for blocks, every run of `block_size` tokens must be a block of one sequence;
        only the last run may be shorter. Tokens that are not `valid` have no say in it.
        """
        logits = self.logits(x)
        return pallas_kernels.top_k_routing(
            logits,
            None if self.expert_bias is None else self.expert_bias[...],
            experts_per_token=self.config.experts_per_token,
            num_groups=self.config.num_groups,
            kept_groups=self.config.kept_groups,
            scaling_factor=self.config.scaling_factor,
            scores=self.config.scores,
            renormalizes=self.config.renormalizes,
            admitted=self._admitted(logits, valid) if self.config.block_capacity else None,
            implementation=self.implementation,
        )

    def _admitted(
        self, logits: Float32[Array, "T E"], valid: Bool[Array, " T"] | None
    ) -> Bool[Array, "T E"]:
        """Returns the experts that the block of each token reaches; ties go to the lower id."""
        T, E = logits.shape
        L, count = self.config.block_size, self.config.block_capacity
        assert self.expert_bias is not None, "blocks are limited in routers with a bias"
        scores = jax.nn.sigmoid(logits) + self.expert_bias[...]
        if valid is not None:
            scores = jnp.where(valid[:, None], scores, -jnp.inf)
        scores = jnp.pad(scores, ((0, -T % L), (0, 0)), constant_values=-jnp.inf)
        best = jnp.max(scores.reshape(-1, L, E), axis=1)  # [blocks, E]
        _, chosen = jax.lax.top_k(best, count)
        rows = jnp.arange(best.shape[0])[:, None]
        admitted = jnp.zeros(best.shape, bool).at[rows, chosen].set(True)
        return jnp.repeat(admitted, L, axis=0)[:T]


def ops_around_experts(implementation: str) -> str:
    """Returns the implementation of the other ops: for "dense" the differentiable one, XLA's."""
    return "xla" if implementation == "dense" else implementation


def split_router_weight(weight: Float32[Array, "D E"]) -> Float[Array, "D 3*E"]:
    """Returns the bfloat16 form of a float32 router weight, for bfloat16 models.

    Three bfloat16 numbers hold the 24 bits of a float32, and products of bfloat16 are exact in
    float32. So logits from the three parts differ from those of a float32 matmul only by the order
    of the sums. The float32 matmul runs without tensor cores: 58 us for 2048 tokens on an H200.
    Splitting in every step would cost as much, so `loading.serving_params` splits once at load.
    """
    high = _rounded_to_bfloat16(weight)
    middle = _rounded_to_bfloat16(weight - high)
    low = weight - high - middle
    return jnp.concatenate([high, middle, low], axis=1).astype(jnp.bfloat16)


def _rounded_to_bfloat16(x: Float32[Array, "D E"]) -> Float32[Array, "D E"]:
    # Not a cast there and back: XLA may remove the two casts, since that only adds precision.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


class Experts(nnx.Module):
    """Routed SwiGLU experts in the layout of `pallas_kernels.grouped_matmul`."""

    def __init__(self, dim: int, width: int, num_experts: int, *, dtype: jnp.dtype):
        self.w_gate_up = nnx.Param(jnp.zeros((num_experts, 2 * width, dim), dtype))
        self.w_down = nnx.Param(jnp.zeros((num_experts, dim, width), dtype))


class SharedExpert(nnx.Module):
    """The expert that every token uses, in the layout of the routed experts; it may be wider."""

    def __init__(self, dim: int, width: int, *, dtype: jnp.dtype):
        self.w_gate_up = nnx.Param(jnp.zeros((2 * width, dim), dtype))
        self.w_down = nnx.Param(jnp.zeros((dim, width), dtype))


class SparseMoE(nnx.Module):
    """Adds the weighted sum of the routed experts and the unscaled output of the shared expert.

    Where experts are split over ranks, the result is this rank's part of that sum.
    """

    def __init__(self, dim: int, config: MoEConfig, *, dtype: jnp.dtype, implementation: str):
        self.implementation = implementation
        self.num_ranks = config.num_ranks
        self.activation: pallas_kernels.Activation = config.activation
        self.router = Router(dim, config.router, implementation=ops_around_experts(implementation))
        num_experts = config.router.num_experts // config.num_ranks
        self.experts = Experts(dim, config.width, num_experts, dtype=dtype)
        self.shared_experts = (
            SharedExpert(dim, config.shared_width, dtype=dtype) if config.shared_width else None
        )

    def __call__(
        self, x: Float[Array, "T D"], *, valid: Bool[Array, " T"] | None = None
    ) -> Float[Array, "T D"]:
        with jax.named_scope("router"):
            ids, weights = self.router(x, valid)
        return self.sum_of_experts(x, ids, weights, valid)

    def sum_of_experts(
        self,
        x: Float[Array, "T D"],
        ids: Int32[Array, "T k"],
        weights: Float32[Array, "T k"],
        valid: Bool[Array, " T"] | None,
    ) -> Float[Array, "T D"]:
        """Returns the weighted sum of the chosen experts, and the shared expert's output.

        `ids` are those of the whole model; a rank leaves out the experts of other ranks.
        """
        shared = self.shared_experts
        if self.num_ranks > 1:
            is_mine = ids % self.num_ranks == sharding.rank()
            ids = jnp.where(is_mine, ids // self.num_ranks, -1)
        with jax.named_scope("experts"):
            return pallas_kernels.grouped_matmul(
                x,
                self.experts.w_gate_up[...],
                self.experts.w_down[...],
                ids,
                weights,
                shared=None if shared is None else (shared.w_gate_up[...], shared.w_down[...]),
                valid=valid,
                experts_of_model=self.router.config.num_experts,
                activation=self.activation,
                implementation=self.implementation,
                out_dtype=x.dtype,
            )
