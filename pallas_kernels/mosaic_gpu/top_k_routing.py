"""Group-limited top-k routing, one token per CTA, as one kernel behind one XLA reduction.

XLA alone makes this op three sorts and some ten launches: 100 us for 2048 tokens and 16 us for 32
(H200). Here a warpgroup holds the E scores of a token, two a thread. The sum of each group's two
best scores comes from XLA (one reduction over all tokens); the kernel ranks those few scalars,
masks the lost groups, and k rounds of (maximum, lowest index that attains it, mask it) pick the
experts in descending order. Bytes are nothing (T * E * 4); the bound is latency: 2 k reductions
over a warpgroup, about 0.12 us each.

A tile of 64 tokens in the accumulator layout, whose rows reduce by two shuffles, was tried first:
18 thousand instructions a thread on one or few SMs, 83 us.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import compat

_THREADS = 128
# Finite and below every score: a dropped or taken expert.
_DROPPED = -1e30
_NO_INDEX = 2**30


def why_not(*, num_experts: int) -> str | None:
    """Returns why this kernel cannot route the shape, or None."""
    if num_experts % _THREADS or num_experts > 1024:
        return f"experts must be a multiple of {_THREADS} and at most 1024, {num_experts=}"
    return None


def top_k_routing(
    router_logits: jax.Array,  # float32 [T, E]
    expert_bias: jax.Array,  # float32 [E]
    *,
    experts_per_token: int,
    num_groups: int,
    kept_groups: int,
    scaling_factor: float,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (ids int32 [T, k], weights float32 [T, k]); see `pallas_kernels.top_k_routing`."""
    T = router_logits.shape[0]
    k = experts_per_token
    body = functools.partial(
        _route_token,
        k=k,
        num_groups=num_groups,
        kept_groups=kept_groups,
        scaling_factor=scaling_factor,
    )
    arguments = [router_logits, expert_bias]
    if num_groups > 1:
        choice = jax.nn.sigmoid(router_logits) + expert_bias
        arguments += _best_two(choice.reshape(T, num_groups, -1))
    return compat.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((T, k), jnp.int32),
            jax.ShapeDtypeStruct((T, k), jnp.float32),
        ),
        grid=(T,),
        grid_names=("token",),
        # Scores decide who is chosen: the exponential must be that of the reference.
        compiler_params={"approx_math": False},
        interpret=interpret,
    )(*arguments)


def _best_two(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two largest along the last axis, in one pass; adding them would be a launch."""

    def best_two(left, right):
        (high, second), (other_high, other_second) = left, right
        rest = jnp.maximum(second, other_second)
        return jnp.maximum(high, other_high), jnp.maximum(jnp.minimum(high, other_high), rest)

    lowest = jnp.full((), _DROPPED, x.dtype)
    return lax.reduce((x, jnp.full_like(x, _DROPPED)), (lowest, lowest), best_two, (x.ndim - 1,))


def _route_token(
    logits_gmem, bias_gmem, *refs, k, num_groups, kept_groups, scaling_factor
):  # fmt: skip
    *best_two, ids_gmem, weights_gmem = refs
    token = lax.axis_index("token")
    E = bias_gmem.shape[0]
    layout = plgpu.Layout.WG_STRIDED((E,), vec_size=E // _THREADS)
    index = plgpu.broadcasted_iota(jnp.int32, (E,), 0, layout=layout)
    logits = plgpu.layout_cast(logits_gmem[token], layout)
    choice = _sigmoid(logits) + plgpu.layout_cast(bias_gmem[...], layout)
    if num_groups > 1:
        high, second = best_two
        scores = [high[token, group] + second[token, group] for group in range(num_groups)]
        group_of = lax.div(index, jnp.int32(E // num_groups))
        for group, kept in enumerate(_kept(scores, kept_groups)):
            lost = jnp.where(kept, num_groups, group)  # no expert is of group `num_groups`
            choice = jnp.where(group_of == lost, _DROPPED, choice)

    chosen, scores = [], []
    for _ in range(k):
        high = jnp.max(choice)
        first = -jnp.max(jnp.where(choice == high, -index, -_NO_INDEX))
        # A row of NaN has no maximum; it must not read outside the row.
        chosen.append(jnp.minimum(first, E - 1))
        choice = jnp.where(index == first, _DROPPED, choice)
    scores = [_sigmoid(logits_gmem[token, expert]) for expert in chosen]
    scale = scaling_factor / (functools.reduce(jnp.add, scores) + 1e-20)
    for place, (expert, score) in enumerate(zip(chosen, scores, strict=True)):
        ids_gmem[token, place] = expert
        weights_gmem[token, place] = score * scale


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _kept(scores, kept_groups):
    """Returns, per group, whether fewer than `kept_groups` beat it; equal ones by their order."""
    kept = []
    for group, score in enumerate(scores):
        better = [
            jnp.where((other >= score) if rival < group else (other > score), 1, 0)
            for rival, other in enumerate(scores)
            if rival != group
        ]
        kept.append(functools.reduce(jnp.add, better) < kept_groups)
    return kept
