"""Dense matmul of 129 to 384 token rows on Hopper, x @ w.T: weights and tensor cores in balance.

It has the contract of the kernel in `mosaic_gpu.py`: w is [N, K] as Hugging Face has it, the result
is a tuple of the parts of a split contraction, SwiGLU is applied to the accumulators, and a row's
bits depend on its own values alone.

Shared memory is the bound. A wgmma of 64 rows and n columns takes n / 2 cycles of the tensor cores
and 16 + n / 4 of shared memory (operands of 16 in K), and each byte that arrives is written there
once more: (tokens + weight rows) / 4 cycles. So tiles are nearly square with a large n: 192 tokens
and 192 weight rows are in balance (288 and 288 cycles), 192 tokens and 96 weight rows are not (144
and 192). Hence

- SwiGLU takes the same columns of gate and up side by side in shared memory, as one wgmma;
- a narrow result takes more columns and a part of the contraction (`splits`);
- `swapped` makes the weights operand A, in blocks of 64 rows, and all tokens of the CTA one n.

A pair of CTAs with different columns shares the loads of the tokens, a pair with different tokens
shares the loads of the weights (TMA multicast). One warpgroup loads, each of the others multiplies
`rows` tokens (swapped: weight rows). If there are more tiles than SMs, persistent CTAs take several
tiles each, and their loads for the next tile start during the epilogue. Tokens and columns past the
last one are neither loaded nor stored: TMA leaves out what an array does not have.

It does not win everywhere, so measured data says which tile serves a shape (`tiles/<device>.json`;
an entry also serves somewhat fewer tokens, and Hopper GPUs without a table use the H200's). XLA
serves the other shapes. Measured on an H200, us a call, this kernel / XLA. gate_up includes SwiGLU.
down and out do not include the addition of their parts, which the next kernel does; only XLA's qkv
of Dream includes it. Brackets mark what is left to XLA:

    tokens           gate_up        qkv            down           out
    192, LLaDA-8B     67.6 /  70.8   37.7 / 39.0    36.8 / 38.1    15.5 / 17.2
    256, LLaDA-8B     84.9 /  88.4  (45.7 / 42.9)   44.3 / 46.5    18.0 / 20.1
    384, LLaDA-8B    118.5 / 120.6  (60.9 / 60.4)   59.5 / 66.2    23.6 / 27.4
    192, Dream-7B     94.2 / 106.0   15.1 / 20.2    49.8 / 52.8    13.2 / 18.0
    256, Dream-7B   (113.7 / 114.5)  16.6 / 19.8   (61.5 / 60.1)   15.4 / 16.5
    384, Dream-7B    159.2 / 163.1   21.7 / 22.9   (84.8 / 82.9)   19.6 / 22.8

Rejected: a cluster adds the parts of a contraction through distributed shared memory (1.0 to 1.7
times as long), and four CTAs share loads (1.5 times).
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

from pallas_kernels import device, dispatch, tiles
from pallas_kernels.hopper import compat, limits
from pallas_kernels.hopper import ring as rings
from pallas_kernels.hopper.ring import Ring

_ROWS = 64  # M of a wgmma
_BLOCK_K = 64  # contraction of a stage: 128 bytes, a row of the widest swizzle
# By number of compute warpgroups: the registers of a thread that computes and of one that loads.
# Together they are what the launch gives: 65536 / threads, rounded down to a multiple of 8, each.
# Then the columns of the widest wgmma, which must fit in the registers of a thread at launch (ptxas
# C7602).
_REGISTERS = {2: (232, 40), 3: (152, 56), 4: (104, 64)}
_WIDEST_WGMMA = {2: 256, 3: 192, 4: 128}
_BESIDE_ACCUMULATORS = 32  # other registers of a thread that computes: with fewer, ptxas spills


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile parameters; `stages` is cut to what shared memory and the contraction have."""

    tokens: int  # of a CTA: a multiple of `rows` (swapped: of 64), at most 256
    columns: int  # of a CTA's result: a multiple of 16 (swapped: of `rows`), at most 256
    rows: int = 64  # tokens (swapped: columns) of a compute warpgroup: 64 or 128
    splits: int = 1  # parts of the contraction; each gives an array of results
    share_tokens: int = 1  # CTAs of a cluster with neighbouring columns: 1 or 2
    share_weights: int = 1  # CTAs of a cluster with neighbouring tokens: 1 or 2; not both 2
    swapped: bool = False  # the weights are operand A; not for SwiGLU
    stages: int = 8  # at most

    def __post_init__(self):
        if (
            self.rows not in (64, 128)
            or self.tokens % _ROWS
            or not _ROWS <= self.tokens <= limits.WIDEST
            or self.columns % 16
            or not 16 <= self.columns <= limits.WIDEST
            or self._side % self.rows
            or self.warpgroups not in _REGISTERS
            or self.splits < 1
            or {self.share_tokens, self.share_weights} not in ({1}, {1, 2})
            or self.stages < 2
        ):
            raise ValueError(f"wide_matmul: no such tile: {self}")

    @property
    def _side(self) -> int:
        """The side of the accumulator that the warpgroups divide."""
        return self.columns if self.swapped else self.tokens

    @property
    def warpgroups(self) -> int:
        """The number of compute warpgroups."""
        return self._side // self.rows

    @property
    def cluster(self) -> int:
        """The number of CTAs in a cluster."""
        return self.share_tokens * self.share_weights


def tile_for(
    tokens: int,
    columns: int,
    contraction: int,
    *,
    swiglu: bool,
    dtype: jnp.dtype = jnp.bfloat16,
) -> Tile | None:
    """Returns the tile that was measured to beat XLA at a shape; None if none is known."""
    if tokens % 16:  # padding would copy x and each part
        return None
    found = tiles.lookup(
        "dense_matmul",
        tokens=tokens,
        columns=columns,
        contraction=contraction,
        halves=2 if swiglu else 1,
    )
    if not found:
        return None
    tile = Tile(**found)
    # A part may be larger than the sum, more than float16 holds.
    if tile.splits > 1 and jnp.dtype(dtype) == jnp.float16:
        return None
    return tile


def why_not(
    *,
    dtype: jnp.dtype,
    tokens: int,
    columns: int,
    contraction: int,
    swiglu: bool = False,
) -> str | None:
    """Returns why the kernel should not serve this shape; None if it should.

    `columns` are those of the result.
    """
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if tile_for(tokens, columns, contraction, swiglu=swiglu, dtype=dtype):
        return None
    shape = f"{tokens=}, {columns=}, {contraction=}, {swiglu=}"
    return f"no tile that beats XLA is known for {shape} in {jnp.dtype(dtype).name}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything static about one launch."""

    tile: Tile
    tokens: int
    columns: int  # of the result
    contraction: int
    halves: int  # 2: gate and up
    dtype: jnp.dtype

    @property
    def weight_rows(self) -> int:
        """Rows of w that a CTA multiplies at the same time."""
        return self.halves * self.tile.columns

    @property
    def wgmma_columns(self) -> int:
        """The n of a warpgroup's accumulator; gate and up share one accumulator."""
        return self.tile.tokens if self.tile.swapped else self.weight_rows

    @property
    def steps(self) -> int:
        return self.contraction // self.tile.splits // _BLOCK_K

    @property
    def groups(self) -> tuple[int, int, int]:
        """Clusters of the launch: along tokens, columns and parts."""
        tile = self.tile
        return (
            -(-self.tokens // (tile.tokens * tile.share_weights)),
            -(-self.columns // (tile.columns * tile.share_tokens)),
            tile.splits,
        )

    @property
    def chunk(self) -> int:
        """Columns that one TMA stores: a divisor of every CTA's columns, at most 128 bytes."""
        return math.gcd(128 // self.dtype.itemsize, self.tile.columns, self.columns)

    @property
    def chunk_rows(self) -> int:
        """Tokens that one TMA stores."""
        return _ROWS if self.tile.swapped else self.tile.rows

    def layout(self) -> tuple[int, int]:
        """Returns (stages, chunks that a warpgroup stores at the same time); stages come first."""
        tile, size = self.tile, self.dtype.itemsize
        stage = (self.weight_rows + tile.tokens) * _BLOCK_K * size
        chunks = tile.warpgroups * self.chunk_rows * self.chunk * size  # one for each warpgroup
        stages = min(tile.stages, max(self.steps, 2), (limits.BUFFERS - chunks) // stage)
        return stages, min(4, (limits.BUFFERS - stages * stage) // chunks)

    def problems(self) -> list[str]:
        """Returns what the tile cannot do for this shape."""
        tile, columns = self.tile, self.wgmma_columns
        accumulators, registers = tile.rows * columns // 128, _REGISTERS[tile.warpgroups][0]
        found = {
            "SwiGLU needs the whole contraction": self.halves > 1 and tile.splits > 1,
            "SwiGLU cannot be swapped": self.halves > 1 and tile.swapped,
            "the tile does not divide the contraction": not self.contraction
            or self.contraction % (tile.splits * _BLOCK_K),
            "columns must be a multiple of 16": not self.columns or self.columns % 16,
            # Each CTA of a pair loads half of the tokens, in whole tiles of 8 rows.
            "tokens must be a multiple of 16": self.tokens % 16,
            "fewer tokens than a store has": self.tokens < self.chunk_rows,
            "swapped stores 64 columns": tile.swapped and self.columns % _ROWS,
            f"{accumulators} accumulators in {registers} registers": accumulators
            + _BESIDE_ACCUMULATORS
            > registers,
            f"a wgmma of {columns} columns": columns > _WIDEST_WGMMA[tile.warpgroups],
            f"more than {limits.BUFFERS} bytes of shared memory": self.layout()[0] < 2,
        }
        return [problem for problem, yes in found.items() if yes]


def wide_matmul(
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
    tile = tile or tile_for(T, N, K, swiglu=swiglu, dtype=x.dtype)
    if tile is None:
        raise ValueError(f"wide_matmul: no tile is known: x {x.dtype}{x.shape}, w {w.shape}")
    plan = Plan(tile=tile, tokens=T, columns=N, contraction=K, halves=halves, dtype=x.dtype)
    problems = [f"{w.shape[1]=} is not the contraction"] * (w.shape[1] != K) + plan.problems()
    if problems:
        raise ValueError(f"wide_matmul: {problems[0]}: x {x.shape}, w {w.shape}, {tile}")
    kernel = _kernel(plan, device.local_device().num_multiprocessors, interpret)
    return tuple(kernel(x, w.reshape(halves, N, K)))


def _kernel(plan: Plan, sms: int, interpret: Any) -> Callable[..., Any]:
    """Returns the kernel, a function of x [T, K] and w [halves, N, K]; it returns each split."""
    tile, steps, chunk = plan.tile, plan.steps, plan.chunk
    columns, rows, warpgroups = tile.columns, tile.rows, tile.warpgroups
    stages, buffers = plan.layout()
    compute_registers, load_registers = _REGISTERS[warpgroups]
    token_groups, column_groups, _ = plan.groups
    items = math.prod(plan.groups)  # an item is the work of a cluster: one tile for each CTA
    clusters = min(items, sms // tile.cluster)
    sharing = {"columns": tile.share_tokens, "tokens": tile.share_weights}
    sharing = {name: size for name, size in sharing.items() if size > 1}
    box = min(tile.tokens, plan.tokens)  # a TMA box must not be taller than the array
    int32 = jnp.int32

    def part_of_cluster(name):
        return lax.axis_index(name) if name in sharing else 0

    def shared_along(name):
        return name if name in sharing else None

    def body(x_gmem, w_gmem, *refs):
        outs_gmem, refs = refs[: tile.splits], refs[tile.splits :]
        w_smem, x_smem, out_smem, full, empty = refs
        ring = Ring(stages=stages, full=full, empty=empty)
        warpgroup, cluster = lax.axis_index("warpgroup"), lax.axis_index("cluster")
        my_items = items // clusters
        if items % clusters:
            my_items = lax.div(items - cluster + (clusters - 1), int32(clusters))

        def locate(index):
            """Returns (split, first token, first column) of an item of this CTA."""
            item = cluster + index * clusters
            token_tile = lax.rem(item, int32(token_groups))
            rest = lax.div(item, int32(token_groups))
            token_tile = token_tile * tile.share_weights + part_of_cluster("tokens")
            column_tile = lax.rem(rest, int32(column_groups))
            column_tile = column_tile * tile.share_tokens + part_of_cluster("columns")
            return (
                lax.div(rest, int32(column_groups)),
                pl.multiple_of(token_tile * tile.tokens, _ROWS),
                pl.multiple_of(column_tile * columns, 8),
            )

        def load():
            plgpu.set_max_registers(load_registers, action="decrease")

            def load_item(index, _):
                split, first_token, first_column = locate(index)

                def load_stage(k, _):
                    step = index * steps + k
                    stage = ring.stage_of(step)
                    ring.wait_until_empty(step)
                    depth = pl.ds((split * steps + k) * _BLOCK_K, _BLOCK_K)
                    for half in range(plan.halves):
                        plgpu.copy_gmem_to_smem(
                            w_gmem.at[half, pl.ds(first_column, columns), depth],
                            w_smem.at[stage, pl.ds(half * columns, columns)],
                            full.at[stage],
                            collective_axes=shared_along("tokens"),
                        )
                    plgpu.copy_gmem_to_smem(
                        x_gmem.at[pl.ds(first_token, box), depth],
                        x_smem.at[stage, pl.ds(0, box)],
                        full.at[stage],
                        collective_axes=shared_along("columns"),
                    )
                    return ()

                lax.fori_loop(0, steps, load_stage, ())
                return ()

            lax.fori_loop(0, my_items, load_item, ())
            ring.drain(my_items * steps)

        def compute():
            plgpu.set_max_registers(compute_registers, action="increase")
            my_rows = pl.ds(warpgroup * rows, rows)

            a_smem, b_smem = (w_smem, x_smem) if tile.swapped else (x_smem, w_smem)

            def compute_item(index, _):
                split, first_token, first_column = locate(index)
                first_step = index * steps

                def product(acc):
                    def accumulate(_, stage):
                        plgpu.wgmma(acc, a_smem.at[stage, my_rows], b_smem.at[stage].T)

                    ring.multiply(accumulate, steps, first=first_step)
                    value = acc[...]
                    ring.release(first_step + steps - 1)
                    return value

                value = pl.run_scoped(product, compat.ACC((rows, plan.wgmma_columns), jnp.float32))
                if plan.halves == 2:
                    gate, up = value[:, :columns], value[:, columns:]
                    value = gate / (1 + jnp.exp(-gate)) * up
                store(value.astype(plan.dtype), split, first_token, first_column)
                return ()

            lax.fori_loop(0, my_items, compute_item, ())
            plgpu.wait_smem_to_gmem(0)

        def store(value, split, first_token, first_column):
            """Stores a warpgroup's [rows, columns] (swapped: [rows of w, tokens]) in chunks."""
            if tile.swapped:
                first_column += warpgroup * rows
                blocks = [
                    (value[c : c + chunk, t : t + _ROWS], t, c)
                    for t in range(0, tile.tokens, _ROWS)
                    for c in range(0, rows, chunk)
                ]
            else:
                first_token += warpgroup * rows
                blocks = [(value[:, c : c + chunk], 0, c) for c in range(0, columns, chunk)]
            for index, (block, token, column) in enumerate(blocks):
                buffer = out_smem.at[warpgroup, index % buffers]
                # The last chunk of this buffer must have been read; later chunks may still be.
                if index == 0 or index >= buffers:
                    plgpu.wait_smem_to_gmem(min(index, buffers - 1), wait_read_only=True)
                if tile.swapped:
                    buffer.T[...] = block
                else:
                    buffer[...] = block
                plgpu.commit_smem()
                column = pl.multiple_of(first_column + column, chunk)
                where = (
                    pl.ds(pl.multiple_of(first_token + token, _ROWS), plan.chunk_rows),
                    pl.ds(column, chunk),
                )
                # The last CTA may have fewer columns.
                exists = column < plan.columns if plan.columns % columns else True
                for index_of_split, out_gmem in enumerate(outs_gmem):
                    pl.when((split == index_of_split) & exists)(
                        lambda buffer=buffer, out=out_gmem.at[where]: plgpu.copy_smem_to_gmem(
                            buffer, out, commit_group=False
                        )
                    )
                # Commits a group also without a store: the waits count groups.
                plgpu.commit_smem_to_gmem_group()

        # One branch per role: ptxas honours set_max_registers in no other form.
        lax.cond(warpgroup == warpgroups, load, compute)

    body.__name__ = "wide_swiglu" if plan.halves == 2 else "wide_matmul"

    tiled = functools.partial(compat.tiled, dtype=plan.dtype)
    scratch = [
        plgpu.SMEM((stages, plan.weight_rows, _BLOCK_K), plan.dtype, transforms=tiled(_BLOCK_K)),
        plgpu.SMEM((stages, tile.tokens, _BLOCK_K), plan.dtype, transforms=tiled(_BLOCK_K)),
        plgpu.SMEM(
            (warpgroups, buffers, plan.chunk_rows, chunk), plan.dtype, transforms=tiled(chunk)
        ),
        *rings.barriers(
            stages, copies=plan.halves + 1, readers=warpgroups, shared_along=tuple(sharing)
        ),
    ]
    out_type = jax.ShapeDtypeStruct((plan.tokens, plan.columns), plan.dtype)
    return compat.kernel(
        body,
        out_type=[out_type] * tile.splits,
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=tuple(sharing.values()),
        cluster_names=tuple(sharing),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Safe: only TMA reads shared memory that a warpgroup writes, after commit_smem, and the
        # warpgroup writes it again only after wait_smem_to_gmem.
        compiler_params={"unsafe_no_auto_barriers": True},
        interpret=interpret,
    )
