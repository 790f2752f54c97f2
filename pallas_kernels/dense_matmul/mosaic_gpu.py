"""Dense matmul of few token rows on Hopper, x @ w.T: the weights are streamed once.

A CTA computes `columns` output columns of all token rows, for one of `splits` equal parts of the
contraction. (A column is a row of w, which is stored [N, K] as Hugging Face has it.) One warpgroup
issues TMA loads of [columns, block_k] weights and [T, block_k] tokens into a ring of stages; one
warpgroup for each 64 tokens multiplies. The accumulator is [tokens, columns]: the tokens are
wgmma's operand A, the transposed weights are B. So the number of columns may be any multiple of 16,
and `columns` is chosen to give one wave of nearly equal CTAs: 12288 columns are 128 CTAs of 96
columns, and 3584 columns with the contraction in four parts are 128 CTAs of 112. Tokens are padded
to whole wgmmas in shared memory only: padding is neither loaded nor stored.

A cluster of two CTAs with neighbouring columns loads the tokens once for both (TMA multicast).
Without that, L2 would have to give 1 + T / columns bytes for each byte of weights: 10 TB/s for 128
tokens and 96 columns, twice what it can. Each SM still receives all tokens, so more columns are
better. Larger clusters are slower (81 us for four CTAs, 54 for two): a stage waits for the slowest
CTA.

SwiGLU: w holds all gate rows, then all up rows. A CTA computes the same columns of both in two
accumulators, whose elements lie in the same registers: silu(gate) * up in float32, rounded once.

Splits: the result is a tuple of arrays, one for each part of the contraction. The kernel that reads
them adds them (`add_rms_norm` takes any number of addends), so no CTA waits for another.

A row's bits depend on its own values alone. The order of the contraction is static; with
`staggered` it differs between columns, but it is the same for all rows. The rows of a wgmma do not
mix. Rows past the last token are never stored, whatever shared memory holds there.

With SwiGLU and up to 128 columns, loads are issued two stages at a time (`burst`), so that 256
bytes of a row of w are read one after another. Columns 96, with / without, us: 64 tokens 52.8 /
54.0, 96 tokens 54.9 / 56.0. Without SwiGLU a burst changes nothing. Nor does `block_k` 128; from 65
tokens on it is slower (few stages).

Bound: reading 2 * N * K bytes at 4.3 TB/s (H200), 47 us for [24576, 4096]. The tensor cores need 33
us of that for 128 tokens if none of the 132 SMs idles, 17 us up to 64 tokens. Measured on an H200,
us, this kernel / XLA (the better of its two layouts), both with the SwiGLU or with the norm that
adds the parts:

    tokens                     gate_up      down         qkv          out
    128, LLaDA-8B              54.3 / 56.3  32.8 / 36.7  28.6 / 35.0  15.4 / 18.2
     64, LLaDA-8B              50.9 / 52.4  29.5 / 35.8  26.8 / 30.5  13.9 / 18.6
    128, Dream-7B              72.0 / 75.0  43.3 / 49.5  13.7 / 15.5  13.7 / 15.0

From 192 tokens on XLA wins (qkv of LLaDA-8B 39 / 34): hence MAX_TOKENS, and `wide_matmul` beyond.

Rejected: the norm as the first phase of this kernel, where the CTAs wait for one another at a
counter while the stages fill with weights (qkv of 64 tokens 34.5 us; norm and product as two
kernels 32.1; the product alone 30.2). The loads and stores of the rows compete with those of the
weights, and the wait takes 1 us more.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import device, dispatch
from pallas_kernels.hopper import compat, limits
from pallas_kernels.hopper import ring as rings
from pallas_kernels.hopper.ring import Ring

MAX_TOKENS = 128
_ROWS = 64  # tokens of a wgmma, and of a compute warpgroup
_BLOCK_K = 64  # contraction of a stage: 128 bytes, a row of the widest swizzle
_STEP = 16  # columns of a CTA are a multiple of it
_MOST_ACCUMULATORS = 192  # registers of a thread for accumulators
_ENOUGH_STAGES = 6  # loads in flight are no longer what a CTA waits for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile parameters; `stages` is cut to what shared memory and the contraction have."""

    columns: int  # output columns of a CTA: a multiple of 16, at most 256
    splits: int = 1  # parts of the contraction; each gives an array of results
    cluster: int = 1  # CTAs that share the loads of the tokens: 1 or 2
    block_k: int = _BLOCK_K  # contraction of a stage: a multiple of 64
    stages: int = 16  # at most
    burst: int = 1  # stages whose loads are issued together
    staggered: bool = False  # clusters begin at different places of the contraction

    def __post_init__(self):
        if (
            self.columns % _STEP
            or not _STEP <= self.columns <= limits.WIDEST
            or self.splits < 1
            or self.cluster not in (1, 2)
            or self.block_k % 64
            or self.block_k < 64
            or self.burst < 1
            # While the loads wait for a burst of stages, one more stage is being multiplied.
            or self.stages < self.burst + 1
        ):
            raise ValueError(f"dense_matmul: no such tile: {self}")


def tile_for(
    tokens: int,
    columns: int,
    contraction: int,
    *,
    swiglu: bool = False,
    may_split: bool = True,
    sms: int = 132,
) -> Tile:
    """Returns the tile for a shape: one wave of equal CTAs over the SMs, or the fewest waves.

    The contraction is split until a CTA has 96 columns, but each part stays at least 1024 long:
    every part costs another array of results (measured best: 4 parts for [4096, 4096], 2 for
    [3584, 3584]).
    """
    widest = _MOST_ACCUMULATORS if swiglu else limits.WIDEST

    def even(splits, waves=1):
        return -(-columns // (waves * sms // splits * _STEP)) * _STEP

    allowed = [1]
    if may_split and not swiglu:
        allowed += [s for s in (2, 4) if contraction % (64 * s) == 0 and contraction >= 1024 * s]
    splits = next((s for s in allowed if even(s) >= 96), allowed[-1])
    width = even(splits, waves=-(-even(splits) // widest))
    tiles_of_columns = -(-columns // width)
    return Tile(
        columns=width,
        splits=splits,
        cluster=2 if tiles_of_columns % 2 == 0 and tokens % 16 == 0 else 1,
        # Measured time: SwiGLU 1 % less for 144 columns, 4 % more for 96; without SwiGLU the same.
        staggered=swiglu and width > 128,
        # Measured time: SwiGLU 2 % less for 96 columns; without SwiGLU the same. Wider tiles have
        # too few stages.
        burst=2 if swiglu and width <= 128 and contraction % (2 * _BLOCK_K) == 0 else 1,
    )


def why_not(*, dtype: jnp.dtype, tokens: int, columns: int, contraction: int) -> str | None:
    """Returns why the kernel cannot serve this shape with any tile; None if it can.

    `columns` are those of the result.
    """
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if not 1 <= tokens <= MAX_TOKENS:
        return f"for 1 to {MAX_TOKENS} rows, {tokens=}"
    if columns % _STEP or not columns:
        return f"columns must be a multiple of {_STEP}, {columns=}"
    if contraction % 64 or not contraction:
        return f"contraction must be a multiple of 64, {contraction=}"
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything static about one launch."""

    tile: Tile
    tokens: int  # a multiple of 8
    columns: int  # of the result
    contraction: int
    halves: int  # 2: gate and up
    dtype: jnp.dtype

    @property
    def warpgroups(self) -> int:
        """The number of compute warpgroups; each has 64 tokens."""
        return -(-self.tokens // _ROWS)

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.tile.columns)

    @property
    def steps(self) -> int:
        return self.contraction // self.tile.splits // self.tile.block_k

    @property
    def chunk(self) -> int:
        """Columns that one TMA stores: a divisor of every CTA's columns, at most 128 bytes."""
        return math.gcd(128 // self.dtype.itemsize, self.tile.columns, self.columns)

    def stage_bytes(self) -> int:
        rows = self.halves * self.tile.columns + self.warpgroups * _ROWS
        return rows * self.tile.block_k * self.dtype.itemsize

    def piece_bytes(self, piece: int) -> int:
        return self.warpgroups * _ROWS * piece * self.dtype.itemsize

    def layout(self) -> tuple[int, int]:
        """Returns (stages, columns of a piece, which is stored at once).

        Fewer pieces mean fewer waits at the end, but up to `_ENOUGH_STAGES` stages matter more.
        """
        width, stages = self.tile.columns, min(self.tile.stages, max(self.steps, 2))
        pieces = [p for p in range(width, 0, -self.chunk) if width % p == 0]
        narrowest = min((p for p in pieces if 3 * p >= width), default=width)

        def stages_beside(piece: int) -> int:
            left = limits.BUFFERS - self.piece_bytes(piece)
            return min(stages, left // self.stage_bytes())

        most = stages_beside(narrowest)
        if most < min(self.tile.burst + 1, stages):
            raise ValueError(f"dense_matmul: {self} needs more than {limits.BUFFERS} bytes")
        piece = next(p for p in pieces if stages_beside(p) >= min(most, _ENOUGH_STAGES))
        return stages_beside(piece), piece


def dense_matmul(
    x: Float[Array, "T K"],
    w: Float[Array, "R K"],  # R = N; with `swiglu` 2 * N: all gate rows, then all up rows
    *,
    swiglu: bool = False,
    tile: Tile | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T N"], ...]:
    """Returns one array for each split; their sum is x @ w.T, or with `swiglu` silu(gate) * up."""
    (T, K), halves = x.shape, 2 if swiglu else 1
    N = w.shape[0] // halves
    if reason := why_not(dtype=x.dtype, tokens=T, columns=N, contraction=K):
        raise ValueError(f"dense_matmul: {reason}: x {x.shape}, w {w.shape}")
    padded = -(-T // 8) * 8
    tile = tile or tile_for(
        padded,
        N,
        K,
        swiglu=swiglu,
        # A part may be larger than the sum, more than float16 holds.
        may_split=x.dtype != jnp.float16,
        sms=device.local_device().num_multiprocessors,
    )
    plan = _Plan(
        tile=tile,
        tokens=padded,
        columns=N,
        contraction=K,
        halves=halves,
        dtype=jnp.dtype(x.dtype),
    )
    _check(plan, x, w)
    # A TMA box must not be taller than its array. Serving passes multiples of 8: no copy then.
    outs = _kernel(plan, interpret)(jnp.pad(x, ((0, padded - T), (0, 0))), w.reshape(halves, N, K))
    return tuple(out[:T] for out in outs)


def _check(plan: _Plan, x: jax.Array, w: jax.Array) -> None:
    tile = plan.tile
    registers = plan.halves * tile.columns * _ROWS // 128
    problems = {
        f"{w.shape[1]=} is not the contraction": w.shape[1] != plan.contraction,
        "SwiGLU needs the whole contraction": plan.halves > 1 and tile.splits > 1,
        "the tile does not divide the contraction": plan.contraction
        % (tile.splits * tile.block_k * tile.burst),
        "the cluster does not divide the tiles": plan.column_tiles % tile.cluster,
        # Each CTA of a cluster loads an equal part of the tokens, in whole tiles of 8 rows.
        "the cluster does not divide the tokens": plan.tokens % (8 * tile.cluster),
        f"{registers} > {_MOST_ACCUMULATORS} registers of a thread": registers > _MOST_ACCUMULATORS,
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"dense_matmul: {problem}: x {x.shape}, w {w.shape}, {tile}")


def _kernel(plan: _Plan, interpret: Any) -> Callable[..., Any]:
    """Returns the kernel, a function of x [T, K] and w [halves, N, K]; it returns each split."""
    tile, columns, warpgroups = plan.tile, plan.tile.columns, plan.warpgroups
    block_k, splits, steps, chunk = tile.block_k, tile.splits, plan.steps, plan.chunk
    is_cluster = tile.cluster > 1
    stages, piece = plan.layout()
    int32 = jnp.int32

    def body(x_gmem, w_gmem, *refs):
        outs_gmem, (w_smem, x_smem, out_smem, full, empty) = refs[:splits], refs[splits:]
        ring = Ring(stages=stages, full=full, empty=empty)
        warpgroup = lax.axis_index("warpgroup")
        split = lax.axis_index("split")
        column_tile = lax.axis_index("tile")
        if is_cluster:
            column_tile = column_tile * tile.cluster + lax.axis_index("part")
        first_column = pl.multiple_of(column_tile * columns, _STEP)

        def load():
            plgpu.set_max_registers(40, action="decrease")

            def load_burst(index, _):
                burst = [index * tile.burst + i for i in range(tile.burst)]
                for step in burst:
                    ring.wait_until_empty(step)
                for step in burst:
                    load_stage(step)
                return ()

            def load_stage(step):
                stage = ring.stage_of(step)
                block = step
                if tile.staggered:  # clusters begin at different columns of their rows
                    clusters = plan.column_tiles // tile.cluster
                    start = lax.div(lax.axis_index("tile") * steps, int32(clusters))
                    block = lax.rem(step + start, int32(steps))
                depth = pl.ds((split * steps + block) * block_k, block_k)
                for half in range(plan.halves):
                    plgpu.copy_gmem_to_smem(
                        w_gmem.at[half, pl.ds(first_column, columns), depth],
                        w_smem.at[stage, half],
                        full.at[stage],
                    )
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[:, depth],
                    x_smem.at[stage, pl.ds(0, plan.tokens)],
                    full.at[stage],
                    collective_axes="part" if is_cluster else None,
                )

            lax.fori_loop(0, steps // tile.burst, load_burst, ())
            ring.drain(steps)

        def compute():
            plgpu.set_max_registers(232, action="increase")
            my_rows = pl.ds(warpgroup * _ROWS, _ROWS)

            def product(*accumulators):
                def accumulate(_, stage):
                    for half, acc in enumerate(accumulators):
                        plgpu.wgmma(acc, x_smem.at[stage, my_rows], w_smem.at[stage, half].T)

                ring.multiply(accumulate, steps, wgmmas=plan.halves)
                values = [acc[...] for acc in accumulators]
                ring.release(steps - 1)
                return values

            accumulator = compat.ACC((_ROWS, columns), jnp.float32)
            values = pl.run_scoped(product, *[accumulator] * plan.halves)
            if plan.halves == 2:
                gate, up = values
                value = gate / (1 + jnp.exp(-gate)) * up
            else:
                (value,) = values
            value = value.astype(plan.dtype)
            out_mine = out_smem.at[warpgroup]
            for first in range(0, columns, piece):
                if first:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for index in range(piece // chunk):
                    inside = first + index * chunk
                    out_mine.at[index][...] = value[:, inside : inside + chunk]
                plgpu.commit_smem()

                def store_chunk(index, _, first=first):
                    store(out_mine.at[index], first_column + first + index * chunk)
                    return ()

                # Not unrolled: a store has a branch for each result, which is slow to lower.
                lax.fori_loop(0, piece // chunk, store_chunk, ())
            plgpu.wait_smem_to_gmem(0)

        def store(source, column):
            """Copies the real tokens of a chunk to the result, if the result has these columns."""
            column = pl.multiple_of(column, chunk)

            def copy(out_gmem, group):
                stored = min(_ROWS, plan.tokens - group * _ROWS)
                plgpu.copy_smem_to_gmem(
                    source.at[pl.ds(0, stored)],
                    out_gmem.at[pl.ds(group * _ROWS, stored), pl.ds(column, chunk)],
                )

            for index, out_gmem in enumerate(outs_gmem):
                for group in range(warpgroups):
                    mine = (split == index) & (warpgroup == group)
                    if plan.columns % columns:  # the last CTA may have fewer columns
                        mine &= column < plan.columns
                    pl.when(mine)(lambda o=out_gmem, g=group: copy(o, g))

        # One branch per role: ptxas honours set_max_registers in no other form.
        lax.cond(warpgroup == warpgroups, load, compute)

    body.__name__ = "dense_swiglu" if plan.halves == 2 else "dense_matmul"

    tiled = functools.partial(compat.tiled, dtype=plan.dtype)
    scratch = [
        plgpu.SMEM((stages, plan.halves, columns, block_k), plan.dtype, transforms=tiled(64)),
        plgpu.SMEM((stages, warpgroups * _ROWS, block_k), plan.dtype, transforms=tiled(64)),
        plgpu.SMEM((warpgroups, piece // chunk, _ROWS, chunk), plan.dtype, transforms=tiled(chunk)),
        *rings.barriers(
            stages,
            copies=plan.halves + 1,
            readers=warpgroups,
            shared_along=("part",) if is_cluster else (),
        ),
    ]
    out_type = jax.ShapeDtypeStruct((plan.tokens, plan.columns), plan.dtype)
    return compat.kernel(
        body,
        out_type=[out_type] * splits,
        grid=(splits, plan.column_tiles // tile.cluster),
        grid_names=("split", "tile"),
        cluster=(tile.cluster,) if is_cluster else (),
        cluster_names=("part",) if is_cluster else (),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Safe: only TMA reads shared memory that a warpgroup writes, after commit_smem, and the
        # warpgroup writes it again only after wait_smem_to_gmem.
        compiler_params={"unsafe_no_auto_barriers": True},
        interpret=interpret,
    )
