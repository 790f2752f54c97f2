"""Code of one CUDA thread inside a Pallas kernel: 32-bit numbers, warp operations, barriers.

A Pallas kernel computes with vectors spread over a warpgroup; it has no lanes, hence no prefix
sums, no votes and no scattered stores. A function inlined with `compat.inline_mgpu` is MLIR of one
thread instead. The types and functions here let its code read as arithmetic. They run on a GPU
only: the interpreter needs another way to the same result.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, math, memref, nvvm, vector

WARP = 32  # lanes
_ALL_LANES = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Int:
    """A 32-bit integer of a thread; division and `<` are unsigned."""

    value: ir.Value

    def __add__(self, other: Int | int) -> Int:
        return Int(arith.addi(self.value, _raw(other)))

    def __sub__(self, other: Int | int) -> Int:
        return Int(arith.subi(self.value, _raw(other)))

    def __mul__(self, other: Int | int) -> Int:
        return Int(arith.muli(self.value, _raw(other)))

    def __floordiv__(self, other: Int | int) -> Int:
        return Int(arith.divui(self.value, _raw(other)))

    def __mod__(self, other: Int | int) -> Int:
        return Int(arith.remui(self.value, _raw(other)))

    def __and__(self, other: Int | int) -> Int:
        return Int(arith.andi(self.value, _raw(other)))

    def __lshift__(self, other: Int | int) -> Int:
        return Int(arith.shli(self.value, _raw(other)))

    def __xor__(self, other: Int | int) -> Int:
        return Int(arith.xori(self.value, _raw(other)))

    def __lt__(self, other: Int | int) -> Bit:
        return Bit(arith.cmpi(arith.CmpIPredicate.ult, self.value, _raw(other)))

    def equals(self, other: Int | int) -> Bit:
        return Bit(arith.cmpi(arith.CmpIPredicate.eq, self.value, _raw(other)))

    def signed_less(self, other: Int | int) -> Bit:
        return Bit(arith.cmpi(arith.CmpIPredicate.slt, self.value, _raw(other)))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Float:
    """A float32 of a thread, rounded to nearest after every operation."""

    value: ir.Value

    def __add__(self, other: Float | float) -> Float:
        return Float(arith.addf(self.value, _raw_float(other)))

    def __mul__(self, other: Float | float) -> Float:
        return Float(arith.mulf(self.value, _raw_float(other)))

    def __truediv__(self, other: Float | float) -> Float:
        return Float(arith.divf(self.value, _raw_float(other)))

    def __neg__(self) -> Float:
        return Float(arith.negf(self.value))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Bit:
    """A truth value of a thread."""

    value: ir.Value

    def __and__(self, other: Bit) -> Bit:
        return Bit(arith.andi(self.value, other.value))

    def __or__(self, other: Bit) -> Bit:
        return Bit(arith.ori(self.value, other.value))


Number = TypeVar("Number", Int, Float)


def constant(number: int) -> Int:
    return Int(mgpu_utils.c(number, ir.IntegerType.get_signless(32)))


def select(condition: Bit, yes: Int | int, no: Int | int) -> Int:
    return Int(arith.select(condition.value, _raw(yes), _raw(no)))


def least(left: Int, right: Int | int) -> Int:
    return Int(arith.minui(left.value, _raw(right)))


def signed_least(left: Int, right: Int) -> Int:
    return Int(arith.minsi(left.value, right.value))


def signed_most(left: Int, right: Int) -> Int:
    return Int(arith.maxsi(left.value, right.value))


def constant_float(number: float) -> Float:
    return Float(mgpu_utils.c(number, ir.F32Type.get()))


def exp(number: Float) -> Float:
    return Float(math.exp(number.value))


def ordered(number: Float) -> Int:
    """Returns an integer that, signed, compares as the float does; -0 counts as less than 0."""
    bits = arith.bitcast(ir.IntegerType.get_signless(32), number.value)
    return _flip_if_negative(Int(bits))


def from_ordered(number: Int) -> Float:
    return Float(arith.bitcast(ir.F32Type.get(), _flip_if_negative(number).value))


def _flip_if_negative(number: Int) -> Int:
    return number ^ (Int(arith.shrsi(number.value, _raw(31))) & 0x7FFFFFFF)


def scalar(array: Any) -> Int:
    """Returns the int32 scalar that a kernel passed with `plgpu.Layout.WG_SPLAT(())`."""
    return Int(array.registers.item())


def thread() -> Int:
    """Returns the thread's number in its CTA."""
    return Int(mgpu_utils.thread_idx())


def position(index: Int) -> ir.Value:
    """Returns the number as MLIR's loads and stores want an index."""
    return arith.index_cast(ir.IndexType.get(), index.value)


def load(ref: ir.Value, index: Int) -> Int:
    return Int(memref.load(ref, [position(index)]))


def load_float(ref: ir.Value, index: Int) -> Float:
    return Float(memref.load(ref, [position(index)]))


def load_four_floats(ref: ir.Value, index: Int) -> list[Float]:
    """Returns the four values from `index` on, which must be a multiple of 4."""
    four = vector.load(ir.VectorType.get((4,), ir.F32Type.get()), ref, [position(index)])
    return [
        Float(vector.extract(four, dynamic_position=[], static_position=[place]))
        for place in range(4)
    ]


def load_host(low: Int, high: Int) -> Int:
    """Returns the 32 bits that host memory now holds at an address, given in two halves."""
    ptx = "{ .reg .b64 at; mov.b64 at, {$1, $2}; ld.relaxed.sys.global.b32 $0, [at]; }"
    return _asm(ptx, "=r,r,r", low, high, has_side_effects=True)


def store(ref: ir.Value, index: Int, number: Int | Float) -> None:
    memref.store(number.value, ref, [position(index)])


def of_peer(ref: ir.Value, cta: int) -> ir.Value:
    """Returns the shared memory `ref` of CTA number `cta` in this cluster of one dimension."""
    return mgpu_utils.get_cluster_ref(ref, gpu.Dimension.x, _index(cta))


@contextlib.contextmanager
def when(condition: Bit) -> Iterator[None]:
    """Lets the code of its block run in the threads that fulfil the condition."""
    with mgpu_utils.when(condition.value):
        yield


def lanes_with(number: Int) -> Int:
    """Returns the lanes of the warp that hold the same number, as a set of bits."""
    # nvvm.match_sync does not survive Mosaic GPU's serialisation of a kernel (jax 0.11.2).
    ptx = f"match.any.sync.b32 $0, $1, {_ALL_LANES};"
    return _asm(ptx, "=r,r", number, has_side_effects=True, convergent=True)


def count_bits(number: Int) -> Int:
    return _asm("popc.b32 $0, $1;", "=r,r", number)


def of_lane(number: Number, lane: Int | int) -> Number:
    """Returns the number that a lane of the warp holds."""
    operands = (_raw(_ALL_LANES), number.value, _raw(lane), _raw(WARP - 1))
    return type(number)(nvvm.shfl_sync(*operands, nvvm.ShflKind.idx))


def of_partner(number: Int, distance: int) -> Int:
    """Returns the number that lane `lane ^ distance` holds."""
    return Int(mgpu_utils.shfl_bfly(number.value, distance))


def signed_most_of_warp(number: Int) -> Int:
    return Int(mgpu_utils.redux(number.value, _raw(_ALL_LANES), mgpu_utils.ReductionKind.MAX))


def least_of_warp(number: Int) -> Int:
    return Int(mgpu_utils.redux(number.value, _raw(_ALL_LANES), mgpu_utils.ReductionKind.UMIN))


def opaque(number: Int) -> Int:
    """Returns the number, but hides from the compiler that it is the same.

    So the compiler computes values that depend on it again, instead of keeping them in registers.
    """
    return _asm("mov.b32 $0, $1;", "=r,r", number, has_side_effects=True)


def from_lane_below(number: Int, distance: int) -> Int:
    """Returns the number that the lane `distance` below holds; the lowest lanes get their own."""
    return Int(
        nvvm.shfl_sync(
            _raw(_ALL_LANES), number.value, _raw(distance), _raw(0), nvvm.ShflKind.up
        )
    )  # fmt: skip


def prefix_sum(number: Int) -> Int:
    """Returns the sum over the warp's lanes up to and including this one."""
    lane = thread() % WARP
    for step in range(WARP.bit_length() - 1):
        below = from_lane_below(number, 1 << step)
        number += select(lane < 1 << step, 0, below)
    return number


def sync_warp() -> None:
    mgpu_utils.warp_barrier()


def sync_cta() -> None:
    gpu.barrier()


def arrive_at_cluster(*, after_writes: bool) -> None:
    """Arrives at the barrier of the cluster.

    Threads that wait there see this thread's earlier writes only with `after_writes`.
    """
    if after_writes:
        nvvm.cluster_arrive()
    else:
        nvvm.cluster_arrive_relaxed()


def wait_for_cluster() -> None:
    nvvm.cluster_wait()


def _index(number: int) -> ir.Value:
    return arith.constant(ir.IndexType.get(), number)


def _asm(ptx: str, constraints: str, *operands: Int, **options: Any) -> Int:
    """Returns the one result of PTX code."""
    i32 = ir.IntegerType.get_signless(32)
    values = [operand.value for operand in operands]
    result: Any = llvm.inline_asm(i32, values, ptx, constraints, **options)
    return Int(result)


def _raw(number: Int | int) -> ir.Value:
    return constant(number).value if isinstance(number, int) else number.value


def _raw_float(number: Float | float) -> ir.Value:
    return number.value if isinstance(number, Float) else constant_float(number).value
