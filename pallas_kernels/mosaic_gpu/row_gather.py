"""Rows of an array, named by a list of indices, into a swizzled shared-memory tile.

On Hopper, TMA copies boxes only; it gathers from Blackwell on. A warpgroup gathers with cp.async
instead, 16 bytes a thread and step, straight into the layout that wgmma reads: tiles of 8 rows by
128 bytes, whose 16-byte columns are swapped by the exclusive or with the row's number. Copies are
asynchronous: `issue` starts those of a stage as one group, and `wait` returns when all but the
newest groups have landed and wgmma may read them; the caller then arrives on the stage's barrier.

Pallas has no cp.async on Hopper, so this is MLIR written from a kernel (`inline_mgpu`). The
interpreter cannot run it; there, loads and stores of whole rows take its place.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

_THREADS = 128  # of a warpgroup
_CHUNK = 8  # 16-bit elements of a copy
_TILE_ROWS, _TILE_COLUMNS = 8, 64


def issue(x_gmem, indices_gmem, first, columns, target_smem, transforms, *, interpret) -> None:
    """Starts copies of x[indices[first + r], columns] to row r of the tile, as one group.

    Indices outside x name some row of x. `columns` is a pl.ds; `transforms` are the target's.
    """
    rows, width = target_smem.shape
    if interpret is not None:
        for row in range(rows):
            index = jax.numpy.clip(indices_gmem[first + row], 0, x_gmem.shape[0] - 1)
            target_smem[pl.ds(row, 1)] = x_gmem[pl.ds(index, 1), columns]
        plgpu.commit_smem()
        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(transforms), scalar, scalar)
    )
    def copy(_, x, indices, target, first, column):
        _issue_chunks(x, indices, target, first.registers.item(), column.registers.item())

    copy(x_gmem, indices_gmem, target_smem, first, columns.start)


def wait(newest: int, *, interpret) -> None:
    """Waits for all groups but the `newest` ones; then wgmma may read their stages."""
    if interpret is not None:
        return

    @plgpu.inline_mgpu()
    def wait_and_publish(_):
        nvvm.cp_async_wait_group(newest)
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    wait_and_publish()


def _issue_chunks(x, indices, target, first, column) -> None:
    """What one thread does of `issue`; `target` is [rows / 8, columns / 64, 8, 64]."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    tokens, row_elements = ir.MemRefType(x.type).shape
    row_tiles, column_tiles, tile_rows, tile_columns = ir.MemRefType(target.type).shape
    assert (tile_rows, tile_columns) == (_TILE_ROWS, _TILE_COLUMNS)
    chunks_per_tile_row = _TILE_COLUMNS // _CHUNK
    row_chunks = column_tiles * chunks_per_tile_row  # of a row; a power of two
    chunks = row_tiles * _TILE_ROWS * row_chunks

    def const(value: int, type_=i32):
        return arith.constant(type_, ir.IntegerAttr.get(type_, value))

    def scaled(value, factor: int):
        return arith.muli(value, const(factor))

    x_address = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(x))
    target_address = llvm.ptrtoint(i32, mgpu_utils.memref_ptr(target))
    thread = arith.andi(mgpu_utils.thread_idx(), const(_THREADS - 1))
    for start in range(0, chunks, _THREADS):
        chunk = arith.addi(thread, const(start))
        row = arith.divui(chunk, const(row_chunks))
        in_row = arith.andi(chunk, const(row_chunks - 1))
        position = arith.index_cast(ir.IndexType.get(), arith.addi(first, row))
        wanted = start + _THREADS <= chunks or arith.cmpi(
            arith.CmpIPredicate.ult, chunk, const(chunks)
        )
        # Unsigned: a row between two segments holds any index, negative ones too.
        index = arith.minui(memref.load(indices, [position]), const(tokens - 1))
        element = arith.addi(
            arith.muli(arith.extui(i64, index), const(row_elements, i64)),
            arith.extui(i64, arith.addi(column, scaled(in_row, _CHUNK))),
        )
        source = arith.addi(x_address, arith.muli(element, const(2, i64)))
        in_tile = arith.remui(row, const(_TILE_ROWS))
        tile = arith.addi(
            scaled(arith.divui(row, const(_TILE_ROWS)), column_tiles),
            arith.divui(in_row, const(chunks_per_tile_row)),
        )
        swapped = arith.xori(arith.remui(in_row, const(chunks_per_tile_row)), in_tile)
        offset = arith.addi(
            scaled(tile, _TILE_ROWS * _TILE_COLUMNS * 2),
            arith.addi(scaled(in_tile, _TILE_COLUMNS * 2), scaled(swapped, _CHUNK * 2)),
        )
        operands = [arith.addi(target_address, offset), source]
        ptx, constraints = "cp.async.cg.shared.global [$0], [$1], 16;", "r,l"
        if wanted is not True:
            operands, ptx, constraints = [*operands, wanted], "@$2 " + ptx, constraints + ",b"
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), operands, ptx, constraints, has_side_effects=True
        )
    nvvm.cp_async_commit_group()
