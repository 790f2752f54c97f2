"""Per-head RMSNorm and rotation of q and k, straight from the fused projection, as one kernel.

A CTA owns 64 tokens of one head, a [64, head_dim] tile that TMA cuts out of `qkv`, and holds it as
the halves that rotate and the dims that pass through. Rows are normalised in the accumulator
layout (two shuffles a reduction), rotated in registers and stored through the same tile. Bound by
bytes: q and k are read and written once, 2 * T * (N + K) * H * 2 (21 MB, 5 us, for 2048 tokens of
LLaDA2.0-mini), where XLA makes four kernels of it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.mosaic_gpu import compat

ROWS = 64


def why_not(*, dtype: jnp.dtype, head_dim: int, rotary_dim: int) -> str | None:
    """Returns why this kernel cannot serve the shape, or None."""
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if head_dim not in (64, 128, 256):
        return f"head_dim must be 64, 128 or 256, this is {head_dim}"
    if rotary_dim % 64:
        return f"half of the rotary dims must be a multiple of 32, {rotary_dim=}"
    return None


def qk_norm_rope(
    qkv: jax.Array,  # [T, (N + 2 * K) * H]
    q_weight: jax.Array,  # [H]
    k_weight: jax.Array,  # [H]
    cos: jax.Array,  # float32 [T, rotary_dim / 2]
    sin: jax.Array,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    eps: float,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (q [T, N * H], k [T, K * H]); see `pallas_kernels.qk_norm_rope`."""
    T, H = qkv.shape[0], q_weight.shape[0]
    half = cos.shape[1]
    tile = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
    angles = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    body = functools.partial(_norm_rope_tile, num_query_heads=num_query_heads, half=half, eps=eps)
    return compat.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((T, num_query_heads * H), qkv.dtype),
            jax.ShapeDtypeStruct((T, num_kv_heads * H), qkv.dtype),
        ),
        grid=(pl.cdiv(T, ROWS), num_query_heads + num_kv_heads),
        grid_names=("tile", "head"),
        scratch_types=[
            plgpu.SMEM((ROWS, H), qkv.dtype, transforms=tile),
            plgpu.SMEM((ROWS, half), jnp.float32, transforms=angles),
            plgpu.SMEM((ROWS, half), jnp.float32, transforms=angles),
            plgpu.SMEM((H,), qkv.dtype),
            plgpu.Barrier(num_arrivals=4),
        ],
        # The reciprocal root decides bf16 roundings: keep it that of the reference.
        compiler_params={"approx_math": False},
        interpret=interpret,
    )(qkv, q_weight, k_weight, cos, sin)


def _norm_rope_tile(
    qkv_gmem, q_weight_gmem, k_weight_gmem, cos_gmem, sin_gmem, q_gmem, k_gmem,
    tile, cos_smem, sin_smem, weight_smem, arrived,
    *, num_query_heads, half, eps,
):  # fmt: skip
    head = lax.axis_index("head")
    H = tile.shape[1]
    tokens = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
    is_query = head < num_query_heads
    plgpu.copy_gmem_to_smem(qkv_gmem.at[tokens, pl.ds(head * H, H)], tile, arrived)
    plgpu.copy_gmem_to_smem(cos_gmem.at[tokens], cos_smem, arrived)
    plgpu.copy_gmem_to_smem(sin_gmem.at[tokens], sin_smem, arrived)

    @pl.when(is_query)
    def _():
        plgpu.copy_gmem_to_smem(q_weight_gmem, weight_smem, arrived)

    @pl.when(jnp.logical_not(is_query))
    def _():
        plgpu.copy_gmem_to_smem(k_weight_gmem, weight_smem, arrived)

    plgpu.barrier_wait(arrived)
    layout = plgpu.Layout.WGMMA
    starts = [0, half] + list(range(2 * half, H, 32))  # the two halves, then what passes through
    widths = [half, half] + [32] * ((H - 2 * half) // 32)

    def along_rows(values, width):
        return lax.broadcast_in_dim(values, (ROWS, width), [0])

    parts = [
        plgpu.layout_cast(tile[:, pl.ds(start, width)], layout).astype(jnp.float32)
        for start, width in zip(starts, widths, strict=True)
    ]
    squares = functools.reduce(jnp.add, [(part * part).sum(1) for part in parts])
    scale = lax.rsqrt(squares / H + eps)
    normed = []
    for part, start, width in zip(parts, starts, widths, strict=True):
        weight = plgpu.layout_cast(weight_smem[pl.ds(start, width)], layout.reduce(0))
        weight = lax.broadcast_in_dim(weight.astype(jnp.float32), (ROWS, width), [1])
        rounded = (part * along_rows(scale, width)).astype(tile.dtype).astype(jnp.float32)
        normed.append((rounded * weight).astype(tile.dtype).astype(jnp.float32))
    first, second, *rest = normed
    cos = plgpu.layout_cast(cos_smem[...], layout)
    sin = plgpu.layout_cast(sin_smem[...], layout)
    rotated = [first * cos - second * sin, second * cos + first * sin, *rest]
    for part, start, width in zip(rotated, starts, widths, strict=True):
        tile[:, pl.ds(start, width)] = part.astype(tile.dtype)
    plgpu.commit_smem()

    @pl.when(is_query)
    def _():
        plgpu.copy_smem_to_gmem(tile, q_gmem.at[tokens, pl.ds(head * H, H)])

    @pl.when(jnp.logical_not(is_query))
    def _():
        plgpu.copy_smem_to_gmem(tile, k_gmem.at[tokens, pl.ds((head - num_query_heads) * H, H)])

    plgpu.wait_smem_to_gmem(0)
