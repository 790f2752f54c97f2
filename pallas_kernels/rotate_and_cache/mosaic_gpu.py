"""Rotation of q and k, and K,V written to the paged pool in place, as one kernel.

This kernel does all work between a layer's fused projection and its attention: the sum of the
projection's parts (where `dense_matmul` splits it), the bias, the norms per head (if the model has
them), the rotation, and the scatter of K,V into the pool. XLA makes several kernels of it; the
scatter alone takes 11 us for 384 tokens of LLaDA-8B (H200).

A head of a token is a row of `head_dim` values. All data are such rows: q, k and v rows are
contiguous in `qkv`, in the output and in the pool. `head_dim` / 16 neighbouring lanes take a row.
Each lane takes two pieces of 8 values (16 bytes), chosen so that values that rotate together are in
one lane. A warp takes a few rows of one token at a time, and `heads_per_thread` times as many in
all. All loads of these rows start before the first row is computed, and the angles are loaded once
for all of them. Nothing goes through shared memory, and threads wait only for loads.

The bytes are the bound: qkv is read once, q and K,V are written once, 4 * T * (N + 2 * K) * H for
one part (25 MB, 6 us, for 2048 tokens of LLaDA2.0-mini). With few tokens the bound is the latency
of a load and a store.

The pool is updated in place: the kernel gets it as a `jax.new_ref`, which lowers to an output that
must alias the input. XLA copies the pool only if somebody reads its old value afterwards.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, vector
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.hopper import compat, lane_code
from pallas_kernels.hopper.lane_code import WARP, Bit, Int

_PIECE = 8  # values of 16 bits in one load or store
_WARPS = 4  # of a CTA
_MAX_HEADS_PER_THREAD = 8
# Both for `tile_for`. This many warps hide one another's latency. With more heads a thread than the
# second, ptxas delays the loads of the last rows to save registers.
_BUSY_WARPS = 132 * 16
_MOST_HEADS_AT_ONCE = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile parameters: how many heads of one token, a row each, a thread takes part in."""

    heads_per_thread: int

    def __post_init__(self):
        if not 1 <= self.heads_per_thread <= _MAX_HEADS_PER_THREAD:
            raise ValueError(
                f"a thread takes 1 to {_MAX_HEADS_PER_THREAD} heads: {self.heads_per_thread=}"
            )


def why_not(*, dtype: jnp.dtype, head_dim: int, rotary_dim: int) -> str | None:
    """Returns why this kernel cannot serve the shape, or None."""
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if head_dim not in (64, 128, 256, WARP * 2 * _PIECE):
        return f"head_dim must be 64, 128, 256 or 512, this is {head_dim}"
    if rotary_dim % (2 * _PIECE) or not 0 < rotary_dim <= head_dim:
        return (
            f"half of the rotary dims must be a multiple of {_PIECE}, and all of them in the head: "
            f"{rotary_dim=}, {head_dim=}"
        )
    return None


def tile_for(*, tokens: int, num_heads: int, head_dim: int) -> Tile:
    """Returns the tile with most heads a thread that still fills the GPU; `num_heads` is N + 2K."""
    rows = WARP * 2 * _PIECE // head_dim  # of a warp at a time
    whole_token = -(-num_heads // rows)
    heads = max(1, min(_MOST_HEADS_AT_ONCE, tokens * whole_token // _BUSY_WARPS))
    # The warps that this takes share the heads as evenly as possible.
    return Tile(heads_per_thread=-(-whole_token // -(-whole_token // heads)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The static facts of a call."""

    tokens: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    num_pages: int
    page_size: int
    num_parts: int
    has_bias: bool
    eps: float
    tile: Tile

    @property
    def num_heads(self) -> int:
        return self.num_query_heads + 2 * self.num_kv_heads

    @property
    def lanes_per_row(self) -> int:
        return self.head_dim // (2 * _PIECE)

    @property
    def rotating_lanes(self) -> int:
        """Lanes of a row whose values rotate; the values of the others pass through."""
        return self.rotary_dim // (2 * _PIECE)

    @property
    def rows_per_warp(self) -> int:
        """Rows that a warp takes at a time."""
        return WARP // self.lanes_per_row

    @property
    def warps_per_token(self) -> int:
        return -(-self.num_heads // (self.rows_per_warp * self.tile.heads_per_thread))

    @property
    def ctas(self) -> int:
        return -(-self.tokens * self.warps_per_token // _WARPS)


def rotate_and_cache(
    qkv: tuple[Float[Array, "T width"], ...],  # width = (N + 2 * K) * H: q heads, then k, then v
    bias: Float[Array, " width"] | None,
    q_weight: Float[Array, " H"] | None,
    k_weight: Float[Array, " H"] | None,
    cos: Float32[Array, "T rotary_dim/2"],
    sin: Float32[Array, "T rotary_dim/2"],
    pool: Float[Array, "P 2 K Z H"],
    kv_indices: Int32[Array, " T"],
    *,
    num_query_heads: int,
    num_kv_heads: int,
    eps: float,
    tile: Tile | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "P 2 K Z H"]]:
    """Returns (q, pool with the tokens' K,V); see `pallas_kernels.rotate_and_cache`.

    `kv_indices[t]` is page * Z + offset, and no two tokens have the same. A write at P * Z or later
    is dropped. The pool's buffer is updated in place if the caller donates it, or owns it within a
    program.
    """
    plan = _plan(
        qkv, bias, q_weight, k_weight, cos, sin, pool, kv_indices,
        num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, eps=eps, tile=tile,
    )  # fmt: skip
    optional = [array for array in (bias, q_weight, k_weight) if array is not None]
    body = _rotate_and_cache if interpret is None else _interpreted
    cached = jax.new_ref(pool)
    q = compat.kernel(
        functools.partial(body, plan=plan),
        out_type=jax.ShapeDtypeStruct((plan.tokens, num_query_heads, plan.head_dim), pool.dtype),
        grid=(plan.ctas if interpret is None else plan.tokens,),
        grid_names=("cta",),
        # The reciprocal root decides bf16 roundings: keep it that of the reference.
        compiler_params={"approx_math": False},
        interpret=interpret,
    )(*qkv, cos, sin, kv_indices, cached, *optional)
    return q, jax.freeze(cached)


def _plan(
    qkv, bias, q_weight, k_weight, cos, sin, pool, kv_indices,
    *, num_query_heads, num_kv_heads, eps, tile,
) -> _Plan:  # fmt: skip
    """Returns the call's plan; raises ValueError if its arrays do not fit together."""
    N, K = num_query_heads, num_kv_heads
    T, half = cos.shape
    num_pages, _, _, page_size, H = pool.shape
    wanted = {
        **{f"qkv[{i}]": (part, (T, (N + 2 * K) * H), pool.dtype) for i, part in enumerate(qkv)},
        "bias": (bias, ((N + 2 * K) * H,), pool.dtype),
        "q_weight": (q_weight, (H,), pool.dtype),
        "k_weight": (k_weight, (H,), pool.dtype),
        "cos": (cos, (T, half), jnp.float32),
        "sin": (sin, (T, half), jnp.float32),
        "pool": (pool, (num_pages, 2, K, page_size, H), pool.dtype),
        "kv_indices": (kv_indices, (T,), jnp.int32),
    }
    reasons = [
        f"{name} must be {jnp.dtype(dtype)}{shape}, this is {array.dtype}{array.shape}"
        for name, (array, shape, dtype) in wanted.items()
        if array is not None and (array.shape != shape or array.dtype != dtype)
    ]
    if (q_weight is None) != (k_weight is None):
        reasons.append("q and k have both a norm or none")
    if reason := why_not(dtype=pool.dtype, head_dim=H, rotary_dim=2 * half):
        reasons.append(reason)
    if reasons:
        raise ValueError(
            f"rotate_and_cache: {'; '.join(reasons)} (for pool {pool.dtype}{pool.shape}, cos "
            f"{cos.shape}, {num_query_heads=}, {num_kv_heads=})"
        )
    return _Plan(
        tokens=T,
        num_query_heads=N,
        num_kv_heads=K,
        head_dim=H,
        rotary_dim=2 * half,
        num_pages=num_pages,
        page_size=page_size,
        num_parts=len(qkv),
        has_bias=bias is not None,
        eps=eps,
        tile=tile or tile_for(tokens=T, num_heads=N + 2 * K, head_dim=H),
    )


def _rotate_and_cache(*refs, plan: _Plan):
    """The kernel on a GPU; refs are qkv, cos, sin, kv_indices, pool, bias and weights, and q."""

    @compat.inline_mgpu(arg_types=((plgpu.RefType(),) * len(refs), plgpu.Layout.WG_SPLAT(())))
    def run(_, refs, cta):
        rotate_rows(refs, lane_code.scalar(cta), plan)

    run(refs, lax.axis_index("cta"))


def rotate_rows(refs: Sequence[ir.Value], cta: Int, plan: _Plan) -> None:
    """Does the work of one thread: its part of `heads_per_thread` rows of one token."""
    qkv, (cos, sin, kv_indices, pool, *optional, q) = refs[: plan.num_parts], refs[plan.num_parts :]
    bias = optional.pop(0) if plan.has_bias else None
    N, K, H = plan.num_query_heads, plan.num_kv_heads, plan.head_dim
    lane = lane_code.thread() % WARP
    warp = cta * _WARPS + lane_code.thread() // WARP
    token, part = warp // plan.warps_per_token, warp % plan.warps_per_token
    has_token = token < plan.tokens
    token = lane_code.least(token, plan.tokens - 1)  # a warp without a token writes nothing
    columns, angle_column, rotates = _columns(lane % plan.lanes_per_row, plan)

    kv_index = lane_code.load(kv_indices, token)
    angles = [_load(ref, [token, angle_column]) for ref in (cos, sin)]
    weights = [[_load(ref, [column]) for column in columns] for ref in optional]
    rows = []  # (head, whether there is one, its two pieces)
    for step in range(plan.tile.heads_per_thread):
        group = part * plan.tile.heads_per_thread + step
        head = group * plan.rows_per_warp + lane // plan.lanes_per_row
        exists = has_token & (head < plan.num_heads)
        head = lane_code.least(head, plan.num_heads - 1)
        positions = [head * H + column for column in columns]
        parts = [[_load(part, [token, position]) for position in positions] for part in qkv]
        pieces = [functools.reduce(_plus, addends) for addends in zip(*parts, strict=True)]
        if bias is not None:
            biases = [_load(bias, [position]) for position in positions]
            pieces = [_plus(*pair) for pair in zip(pieces, biases, strict=True)]
        rows.append((head, exists, pieces))
    page, offset = kv_index // plan.page_size, kv_index % plan.page_size
    is_cached = kv_index < plan.num_pages * plan.page_size

    # All rows before the first store: their reductions overlap.
    finished = [
        (head, exists, _finished(head, pieces, angles, weights, rotates, plan))
        for head, exists, pieces in rows
    ]
    for head, exists, pieces in finished:
        with lane_code.when(exists & (head < N)):
            for piece, column in zip(pieces, columns, strict=True):
                _store(piece, q, [token, head, column])
        with lane_code.when(exists & is_cached & (lane_code.constant(N - 1) < head)):
            kv_head = head - N
            for piece, column in zip(pieces, columns, strict=True):
                _store(piece, pool, [page, kv_head // K, kv_head % K, offset, column])


def _columns(lane: Int, plan: _Plan) -> tuple[list[Int], Int, Bit | None]:
    """Returns (first columns of a lane's two pieces, first column of its angles, if it rotates).

    The first lanes hold the values that rotate, the others those that pass through. The last result
    is None if all lanes rotate.
    """
    turning = plan.rotating_lanes
    if turning == plan.lanes_per_row:
        first, second, rotates = lane, lane + turning, None
    else:
        passing = plan.lanes_per_row - turning
        rotates = lane < turning
        first = lane_code.select(rotates, lane, lane + turning)
        second = first + lane_code.select(rotates, turning, passing)
    angle = lane_code.least(lane, turning - 1)
    return [first * _PIECE, second * _PIECE], angle * _PIECE, rotates


def _finished(head: Int, pieces, angles, weights, rotates: Bit | None, plan: _Plan):
    """Returns a lane's pieces: normed and rotated for a q or k row, unchanged for a v row."""
    normed = pieces
    if weights:
        is_query = head < plan.num_query_heads
        head_weights = [_select(is_query, *pair) for pair in zip(*weights, strict=True)]
        normed = _normed(pieces, head_weights, plan)
    turned = _rotated(normed, *angles)
    if rotates is not None:
        turned = [_select(rotates, *pair) for pair in zip(turned, normed, strict=True)]
    is_value = lane_code.constant(plan.num_query_heads + plan.num_kv_heads - 1) < head
    return [_select(is_value, *pair) for pair in zip(pieces, turned, strict=True)]


def _normed(pieces, weights, plan: _Plan):
    """Returns a lane's pieces after the row's norm; it rounds before the weight and after it."""
    wide = [_widened(piece) for piece in pieces]
    first, second = wide
    total = _sum_of_row(math.fma(first, first, arith.mulf(second, second)), plan)
    f32 = ir.F32Type.get()
    mean = arith.mulf(total, mgpu_utils.c(1 / plan.head_dim, f32))  # exact: a power of two
    scale = _spread(math.rsqrt(arith.addf(mean, mgpu_utils.c(plan.eps, f32))))
    like = [piece.type for piece in pieces]
    rounded = [
        _narrowed(arith.mulf(piece, scale), kind) for piece, kind in zip(wide, like, strict=True)
    ]
    weighted = [arith.mulf(_widened(a), _widened(b)) for a, b in zip(rounded, weights, strict=True)]
    return [_narrowed(piece, kind) for piece, kind in zip(weighted, like, strict=True)]


def _sum_of_row(piece, plan: _Plan):
    """Returns the sum of the values of all lanes of the row."""
    values = [
        vector.extract(piece, dynamic_position=[], static_position=[place])
        for place in range(_PIECE)
    ]
    while len(values) > 1:
        values = [arith.addf(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    (total,) = values
    distance = 1
    while distance < plan.lanes_per_row:
        total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
        distance *= 2
    return total


def _rotated(pieces, cos, sin):
    """Returns the two pieces after the rotation.

    The products with `sin` are rounded before the sum, those with `cos` are not. LLVM contracts the
    reference for a GPU in the same way, and after a cancellation the difference would show.
    """
    first, second = (_widened(piece) for piece in pieces)
    turned = [
        math.fma(first, cos, arith.negf(arith.mulf(second, sin))),
        math.fma(second, cos, arith.mulf(first, sin)),
    ]
    return [_narrowed(value, piece.type) for value, piece in zip(turned, pieces, strict=True)]


def _plus(piece, other):
    return _narrowed(arith.addf(_widened(piece), _widened(other)), piece.type)


def _load(ref, indices):
    kind = ir.VectorType.get((_PIECE,), ir.MemRefType(ref.type).element_type)
    return vector.load(kind, ref, _positions(indices), alignment=16)


def _store(piece, ref, indices) -> None:
    vector.store(piece, ref, _positions(indices), alignment=16)


def _positions(indices: list[Int]):
    return [lane_code.position(index) for index in indices]


def _select(condition: Bit, yes, no):
    return arith.select(condition.value, yes, no)


def _widened(piece):
    return arith.extf(ir.VectorType.get((_PIECE,), ir.F32Type.get()), piece)


def _narrowed(piece, kind):
    return arith.truncf(kind, piece)


def _spread(value):
    return vector.broadcast(ir.VectorType.get((_PIECE,), value.type), value)


def _interpreted(*refs, plan: _Plan):
    """The same kernel in plain Pallas, one token a CTA: the interpreter has no threads."""
    qkv, (cos, sin, kv_indices, pool, *optional, q) = refs[: plan.num_parts], refs[plan.num_parts :]
    bias = optional.pop(0) if plan.has_bias else None
    N, K, H, half = plan.num_query_heads, plan.num_kv_heads, plan.head_dim, plan.rotary_dim // 2
    token = lax.axis_index("cta")
    rows = functools.reduce(operator.add, [part[token] for part in qkv])
    rows = rows.reshape(plan.num_heads, H)
    if bias is not None:
        rows += bias[...].reshape(plan.num_heads, H)
    values = rows[N + K :]
    rows = rows[: N + K]
    if optional:
        wide = rows.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + plan.eps)
        q_weight, k_weight = (ref[...][None] for ref in optional)
        weights = jnp.where(jnp.arange(N + K)[:, None] < N, q_weight, k_weight)
        rows = (wide * scale).astype(rows.dtype) * weights
    first, second = (rows[:, a : a + half].astype(jnp.float32) for a in (0, half))
    cos, sin = cos[token][None], sin[token][None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    rows = jnp.concatenate([turned.astype(rows.dtype), rows[:, 2 * half :]], axis=1)
    q[token] = rows[:N]
    page, offset = jnp.divmod(kv_indices[token], plan.page_size)

    @pl.when(kv_indices[token] < plan.num_pages * plan.page_size)
    def _():
        pool[page, 0, :, offset] = rows[N:]
        pool[page, 1, :, offset] = values
