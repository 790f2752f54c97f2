"""Group-limited top-k routing of 64 tokens per CTA in registers, as one kernel.

XLA makes this op three sorts and some ten kernels: 100 us for 2048 tokens and 15 us for 32 (H200).
Here a warpgroup holds its 64 x E scores as one array per expert group, in the accumulator layout,
whose row reductions need two shuffles. Groups are ranked by the sum of their two best scores, the
lost ones masked, and k rounds of (row maximum, lowest index that attains it, mask it) pick the
experts in descending order. Bytes are nothing (T * E * 4); the bound is about 5 k instructions a
thread, 3 to 5 us whatever T is below 64 x SMs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import compat

ROWS = 64
# Finite and below every score: a dropped or taken expert.
_DROPPED = -1e30
_NO_INDEX = 2**30


def why_not(*, tokens: int, num_experts: int, num_groups: int) -> str | None:
    """Returns why this kernel cannot route the shape, or None."""
    group = num_experts // num_groups
    if tokens % 4:
        return f"rows of the transposed result must be a multiple of 16 bytes, {tokens=}"
    if num_experts > 256:
        return f"scores of a row must fit the registers: {num_experts=} > 256"
    if num_groups > 1 and (group % 8 or group > 128):
        return f"a group must be 8, 16, .. or 128 experts, {num_experts=} {num_groups=}"
    if num_groups == 1 and num_experts % 8:
        return f"{num_experts=} is no multiple of 8"
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
    T, E = router_logits.shape
    k = experts_per_token
    body = functools.partial(
        _route_tile,
        k=k,
        num_groups=num_groups,
        kept_groups=kept_groups,
        scaling_factor=scaling_factor,
        # Ungrouped experts are held in slices too: a register array is as small as it can be.
        width=E // num_groups if num_groups > 1 else _slice_width(E),
    )
    out = jax.ShapeDtypeStruct((k, T), jnp.int32), jax.ShapeDtypeStruct((k, T), jnp.float32)
    ids, weights = compat.kernel(
        body,
        out_type=out,
        grid=(pl.cdiv(T, ROWS),),
        grid_names=("tile",),
        scratch_types=[
            plgpu.SMEM((ROWS, E), jnp.float32),
            plgpu.SMEM((E,), jnp.float32),
            plgpu.SMEM((k, ROWS), jnp.int32),
            plgpu.SMEM((k, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        # Scores decide who is chosen: the exponential must be that of the reference.
        compiler_params={"approx_math": False},
        interpret=interpret,
    )(router_logits, expert_bias)
    return ids.T, weights.T


def _slice_width(num_experts: int) -> int:
    return next(width for width in (64, 32, 16, 8) if num_experts % width == 0)


def _route_tile(
    logits_gmem, bias_gmem, ids_gmem, weights_gmem,
    logits_smem, bias_smem, ids_smem, weights_smem, arrived,
    *, k, num_groups, kept_groups, scaling_factor, width,
):  # fmt: skip
    first = lax.axis_index("tile") * ROWS
    plgpu.copy_gmem_to_smem(logits_gmem.at[pl.ds(first, ROWS)], logits_smem, arrived)
    plgpu.copy_gmem_to_smem(bias_gmem, bias_smem, arrived)
    plgpu.barrier_wait(arrived)
    layout = plgpu.Layout.WGMMA
    slices = logits_smem.shape[1] // width
    shape = (ROWS, width)

    def along_rows(values):
        return lax.broadcast_in_dim(values, shape, [0])

    def logits_of(index):
        columns = pl.ds(index * width, width)
        return plgpu.layout_cast(logits_smem[:, columns], layout)

    def index_of(index):
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + index * width

    choice = []
    for index in range(slices):
        bias = plgpu.layout_cast(bias_smem[pl.ds(index * width, width)], layout.reduce(0))
        score = _sigmoid(logits_of(index))
        choice.append(score + lax.broadcast_in_dim(bias, shape, [1]))
    if num_groups > 1:
        kept = _kept_groups([_best_two(array, index_of(0)) for array in choice], kept_groups)
        choice = [
            jnp.where(along_rows(keep) > 0, array, _DROPPED)
            for keep, array in zip(kept, choice, strict=True)
        ]

    chosen_scores = []
    for place in range(k):
        high = functools.reduce(jnp.maximum, choice).max(1)
        is_high = along_rows(high)
        negative = [
            jnp.where(array == is_high, -index_of(index), -_NO_INDEX)
            for index, array in enumerate(choice)
        ]
        chosen = -functools.reduce(jnp.maximum, negative).max(1)
        is_chosen = along_rows(chosen)
        picked = [
            jnp.where(index_of(index) == is_chosen, logits_of(index), 0.0)
            for index in range(slices)
        ]
        chosen_scores.append(_sigmoid(functools.reduce(jnp.add, picked).sum(1)))
        ids_smem[place] = chosen
        choice = [
            jnp.where(index_of(index) == is_chosen, _DROPPED, array)
            for index, array in enumerate(choice)
        ]
    scale = scaling_factor / (functools.reduce(jnp.add, chosen_scores) + 1e-20)
    for place, score in enumerate(chosen_scores):
        weights_smem[place] = score * scale
    plgpu.commit_smem()
    tile = pl.ds(first, ROWS)
    plgpu.copy_smem_to_gmem(ids_smem, ids_gmem.at[:, tile])
    plgpu.copy_smem_to_gmem(weights_smem, weights_gmem.at[:, tile])
    plgpu.wait_smem_to_gmem(0)


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _best_two(array, index):
    """Returns the sum of the two largest of each row."""
    shape = array.shape
    high = array.max(1)
    is_high = array == lax.broadcast_in_dim(high, shape, [0])
    first = -jnp.where(is_high, -index, -_NO_INDEX).max(1)
    rest = jnp.where(index == lax.broadcast_in_dim(first, shape, [0]), _DROPPED, array)
    return high + rest.max(1)


def _kept_groups(scores, kept_groups):
    """Returns, per group, 1 in the rows that keep it: fewer than `kept_groups` beat it."""
    kept = []
    for group, score in enumerate(scores):
        better = [
            jnp.where((other >= score) if rival < group else (other > score), 1, 0)
            for rival, other in enumerate(scores)
            if rival != group
        ]
        kept.append(jnp.where(functools.reduce(jnp.add, better) < kept_groups, 1, 0))
    return kept
