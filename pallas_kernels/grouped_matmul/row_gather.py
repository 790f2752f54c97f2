"""A gather: copies the rows that a list of indices names into a swizzled shared-memory tile.

On Hopper, TMA copies boxes only; it can gather from Blackwell on. Here a warpgroup gathers with
cp.async, 16 bytes a thread and step, straight into the layout that wgmma reads: tiles of 8 rows by
128 bytes, where the number of a 16-byte column is XORed with the row's number. A thread keeps its
column and its row modulo 8 in all steps. So a copy costs a thread an index (which is in the first
level cache after a tile's first stage), a multiplication and the copy.

Only the readers wait for copies. Every stage has a barrier of 128 arrivals. After its copies of a
stage, each thread hands its arrival to the hardware (cp.async.mbarrier.arrive.noinc). The hardware
arrives when all earlier copies of that thread have landed, at once if there were none. So the
issuing warpgroup runs ahead as long as there are empty stages, as it does with TMA. cp.async writes
like a thread's stores, but wgmma reads through the asynchronous proxy. So every reading thread
first waits for the barrier, then puts a fence before the wgmma.

Pallas has neither cp.async nor this arrival on Hopper, so this is MLIR inlined into a kernel
(`inline_mgpu`). It uses barriers of its own, because inlined code cannot use a `plgpu.Barrier`. The
interpreter cannot run it; there, loads and stores of whole rows and a `plgpu.Barrier` replace it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref

from pallas_kernels.hopper import compat

_THREADS = 128  # of a warpgroup
_COPY = 8  # 16-bit elements of one cp.async
_TILE_ROWS, _TILE_COLUMNS = 8, 64
BLOCK_COLUMNS = (64, 128)  # widths that a warpgroup can gather: 16 or 8 whole rows a step


def barriers(stages: int, *, interpret: Any) -> Any:
    """Returns the scratch type of the stages' barriers."""
    if interpret is not None:
        return plgpu.Barrier(num_barriers=stages)
    return plgpu.SMEM((2 * stages,), jnp.int32)  # a barrier takes 8 bytes


def start(ready: Any, *, interpret: Any) -> None:
    """Initialises the barriers; all warpgroups of the CTA must call it first."""
    if interpret is not None:
        return

    @compat.inline_mgpu(arg_types=(plgpu.RefType(),))
    def initialise(_, ready):
        address = _shared_address(ready)
        (words,) = ir.MemRefType(ready.type).shape
        is_first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), _i32(0))
        for word in range(0, words, 2):
            barrier = arith.addi(address, _i32(4 * word))
            ptx = f"@$1 mbarrier.init.shared::cta.b64 [$0], {_THREADS};"
            _asm(ptx, "r,b", barrier, is_first)
        gpu.barrier()

    initialise(ready)


def issue(
    x_gmem: Any,
    indices_gmem: Any,
    first: jax.Array,
    size: jax.Array,
    columns: Any,  # a pl.ds
    target_smem: Any,
    ready: Any,
    stage: jax.Array,
    transforms: tuple[Any, ...],
    *,
    interpret: Any,
) -> None:
    """Starts a warpgroup's copies: x[indices[first + r], columns] to row r < size of the tile.

    `first`, `size` (>= 1) and `stage` are int32 scalars; `transforms` are those of the target. An
    index outside x copies an arbitrary row of x. After `wait` on the stage, wgmma sees the rows.
    """
    if interpret is not None:

        def copy_row(row, _):
            index = jnp.clip(indices_gmem[first + row], 0, x_gmem.shape[0] - 1)
            target_smem[pl.ds(row, 1)] = x_gmem[pl.ds(index, 1), columns]
            return ()

        lax.fori_loop(0, size, copy_row, ())
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready.at[stage])
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    refs = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(transforms), plgpu.RefType())

    @compat.inline_mgpu(arg_types=(*refs, scalar, scalar, scalar, scalar))
    def copy(_, x, indices, target, ready, *scalars):
        first, size, column, stage = (scalar.registers.item() for scalar in scalars)
        _issue_copies(x, indices, target, first, size, column)
        barrier = arith.addi(_shared_address(ready), arith.muli(stage, _i32(8)))
        _asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", barrier)

    copy(x_gmem, indices_gmem, target_smem, ready, first, size, columns.start, stage)


def wait(ready: Any, step: jax.Array, stages: int, *, interpret: Any) -> None:
    """Waits for the copies of `step`, in stage step % stages; then wgmma may read them."""
    stage = lax.rem(step, jnp.int32(stages))
    if interpret is not None:
        plgpu.barrier_wait(ready.at[stage])
        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @compat.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar))
    def wait_and_fence(_, ready, stage, parity):
        barrier = arith.addi(_shared_address(ready), arith.muli(stage.registers.item(), _i32(8)))
        ptx = (
            "{ .reg .pred landed;\n"
            "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 landed, [$0], $1;\n"
            "@!landed bra AGAIN;\n"
            "fence.proxy.async.shared::cta; }"
        )
        _asm(ptx, "r,r", barrier, parity.registers.item())

    wait_and_fence(ready, stage, lax.rem(lax.div(step, jnp.int32(stages)), jnp.int32(2)))


def _issue_copies(
    x: ir.Value, indices: ir.Value, target: ir.Value, first: Any, size: Any, column: Any
) -> None:
    """Does the part of one thread in `issue`; `target` is [rows / 8, columns / 64, 8, 64]."""
    i64 = ir.IntegerType.get_signless(64)
    num_indexed, row_elements = ir.MemRefType(x.type).shape
    row_tiles, column_tiles, tile_rows, tile_columns = ir.MemRefType(target.type).shape
    assert (tile_rows, tile_columns) == (_TILE_ROWS, _TILE_COLUMNS)
    row_copies = column_tiles * _TILE_COLUMNS // _COPY
    rows_per_step = _THREADS // row_copies
    assert rows_per_step % _TILE_ROWS == 0, "a thread's row modulo 8 must not change"

    thread = _thread()
    first_row = arith.divui(thread, _i32(row_copies))
    in_row = arith.remui(thread, _i32(row_copies))
    last = arith.subi(size, _i32(1))
    rows, positions = [], []
    for step in range(-(-row_tiles * _TILE_ROWS // rows_per_step)):
        row = arith.addi(first_row, _i32(step * rows_per_step))
        rows.append(row)
        # A row past the last one reads the last one's index: the list may end there.
        position = arith.addi(first, arith.minui(row, last))
        positions.append(arith.index_cast(ir.IndexType.get(), position))
    # All loads before the first copy: their latencies overlap.
    found = [memref.load(indices, [position]) for position in positions]

    in_tile = arith.remui(first_row, _i32(_TILE_ROWS))
    tile_copies = _TILE_COLUMNS // _COPY
    tile = arith.addi(
        arith.muli(arith.divui(first_row, _i32(_TILE_ROWS)), _i32(column_tiles)),
        arith.divui(in_row, _i32(tile_copies)),
    )
    swapped = arith.xori(arith.remui(in_row, _i32(tile_copies)), in_tile)
    destination = arith.addi(
        arith.addi(_shared_address(target), arith.muli(tile, _i32(2 * _TILE_ROWS * _TILE_COLUMNS))),
        arith.addi(
            arith.muli(in_tile, _i32(2 * _TILE_COLUMNS)), arith.muli(swapped, _i32(2 * _COPY))
        ),
    )
    source = arith.addi(
        llvm.ptrtoint(i64, mgpu_utils.memref_ptr(x)),
        _bytes(arith.addi(column, arith.muli(in_row, _i32(_COPY))), 2),
    )
    for step, (row, index) in enumerate(zip(rows, found, strict=True)):
        # Unsigned: an entry that nobody wrote may hold any number, also a negative one.
        index = arith.minui(index, _i32(num_indexed - 1))
        wanted = arith.cmpi(arith.CmpIPredicate.ult, row, size)
        tiles = step * rows_per_step // _TILE_ROWS * column_tiles
        _asm(
            "@$2 cp.async.cg.shared.global [$0], [$1], 16;",
            "r,l,b",
            arith.addi(destination, _i32(tiles * 2 * _TILE_ROWS * _TILE_COLUMNS)),
            arith.addi(source, _bytes(index, 2 * row_elements)),
            wanted,
        )


def _i32(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _bytes(number: Any, size: int) -> ir.Value:
    """Returns the 64-bit product of an unsigned 32-bit value and a constant."""
    i64 = ir.IntegerType.get_signless(64)
    factor = arith.constant(i64, ir.IntegerAttr.get(i64, size))
    return arith.muli(arith.extui(i64, number), factor)


def _thread() -> ir.Value:
    """Returns the thread's number in its warpgroup."""
    return arith.andi(mgpu_utils.thread_idx(), _i32(_THREADS - 1))


def _shared_address(ref: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(i32, mgpu_utils.memref_ptr(ref))


def _asm(ptx: str, constraints: str, *operands: ir.Value) -> None:
    void = ir.Type.parse("!llvm.void")
    constraints += ",~{memory}"  # the compiler moves no read or write across it
    llvm.inline_asm(void, list(operands), ptx, constraints, has_side_effects=True)
