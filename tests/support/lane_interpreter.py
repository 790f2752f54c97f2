"""Interprets the MLIR that a kernel would inline (`lane_code`), which the Mosaic GPU one cannot.

A value is a numpy array over threads. `run_threads` takes a warp at a time, 32 lanes; between
barriers the warps run in random order, so a barrier that is missing shows as a wrong result.
Code that reaches memory by its address (`peer_code`) may wait for other CTAs; warps take turns at
each such access, in random order too. Every access is seen at once by all: what a missing fence
does is not modelled.
Needs the Mosaic GPU of a newer jax: import it after asking `compat.supported`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

LANES = 32
MOST_TURNS = 2000  # of a warp that waits, without another that does anything


def signed(x):
    return x.view(np.int32)


def bits(x):
    return np.asarray(x, np.int32).view(np.uint32)


COMPARISONS = (
    np.equal, np.not_equal,
    lambda a, b: signed(a) < signed(b), lambda a, b: signed(a) <= signed(b),
    lambda a, b: signed(a) > signed(b), lambda a, b: signed(a) >= signed(b),
    np.less, np.less_equal, np.greater, np.greater_equal,
)  # fmt: skip

PURE = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.divui": np.floor_divide,
    "arith.remui": np.remainder,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift,
    "arith.shrsi": lambda a, b: bits(signed(a) >> signed(b)),
    "arith.minui": np.minimum,
    "arith.minsi": lambda a, b: bits(np.minimum(signed(a), signed(b))),
    "arith.maxsi": lambda a, b: bits(np.maximum(signed(a), signed(b))),
    "arith.addf": np.add,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.negf": np.negative,
    "arith.select": np.where,
    "arith.index_cast": lambda a: a.astype(np.uint32 if a.dtype == np.int64 else np.int64),
    "math.exp": np.exp,
}


class Scalar:
    """The part of a scalar FragmentedArray that `lane_code.scalar` reads."""

    def __init__(self, value: ir.Value):
        self.registers = np.array(value, dtype=object)


class Interpreter:
    """What an operation gives all of the threads; a value has the threads on its last axis.

    `thread` [n] are their numbers in their CTAs of `threads`.
    """

    def __init__(self, values: dict, *, thread: np.ndarray, threads: int):
        self.values, self.thread, self.threads = values, thread, threads

    def result(self, op, operands):
        """Returns the result of an operation that touches no memory and no other thread."""
        attributes, kind = op.attributes, op.results[0].type
        if op.name in PURE:
            return PURE[op.name](*operands)
        match op.name:
            case "arith.constant":
                return self._constant(attributes["value"], kind)
            case "arith.cmpi":
                return COMPARISONS[ir.IntegerAttr(attributes["predicate"]).value](*operands)
            case "arith.bitcast":
                is_float = isinstance(kind, ir.F32Type)
                return operands[0].view(np.float32 if is_float else np.uint32)
            case "gpu.thread_id":
                return self.thread if "<x>" in str(attributes["dimension"]) else 0 * self.thread
            case "gpu.block_dim":
                along = self.threads if "<x>" in str(attributes["dimension"]) else 1
                return np.full(self.thread.size, along, np.int64)
            case "vector.extract":
                return operands[0][attributes["static_position"][0]]
            case "llvm.extractvalue":
                return operands[0][attributes["position"][0]]
        raise NotImplementedError(str(op))

    def _constant(self, value, kind):
        if isinstance(kind, ir.F32Type):
            return np.full(self.thread.size, ir.FloatAttr(value).value, np.float32)
        if isinstance(kind, ir.IndexType):
            return np.full(self.thread.size, ir.IntegerAttr(value).value, np.int64)
        assert kind.width == 32
        return np.full(self.thread.size, ir.IntegerAttr(value).value & 0xFFFFFFFF, np.uint32)


class Warp(Interpreter):
    """Interprets a block for 32 threads; `step` runs to the next barrier and returns its kind."""

    def __init__(
        self, block: ir.Block, values: dict, *, first_thread: int, threads: int, peers, addressed
    ):
        thread = np.arange(first_thread, first_thread + LANES, dtype=np.int64)
        super().__init__(values, thread=thread, threads=threads)
        self.peers, self.addressed = peers, addressed
        self.arrivals, self.waits, self.barriers = 0, 0, 0
        self.stopped_at: str | None = None
        self._steps = self._run(block, np.ones(LANES, bool))

    def step(self) -> bool:
        """Returns whether there is more to run."""
        self.waits += self.stopped_at == "wait"
        self.stopped_at = next(self._steps, "end")
        self.arrivals += self.stopped_at == "arrive"
        self.barriers += self.stopped_at == "barrier"
        return self.stopped_at != "end"

    def _run(self, block: ir.Block, active: np.ndarray) -> Iterator[str]:
        for view in block.operations:
            op = view.operation
            operands = [self.values[operand] for operand in op.operands]
            match op.name:
                case "memref.store":
                    self._store(active, *operands)
                case "scf.if":
                    yield from self._run(op.regions[0].blocks[0], active & operands[0])
                case "scf.yield" | "func.return":
                    pass
                case "gpu.barrier":
                    assert active.all()
                    yield "barrier"
                case "nvvm.bar.warp.sync":
                    assert active.all()
                case "nvvm.cluster.arrive" | "nvvm.cluster.arrive.relaxed":
                    yield "arrive"
                case "nvvm.cluster.wait":
                    yield "wait"
                case "llvm.inline_asm" if _ptx(op).startswith("{"):
                    yield from self._access(_ptx(op), active, op, operands)
                case name:
                    if name.startswith("nvvm") or name == "llvm.inline_asm":
                        assert active.all() or "popc" in str(op) or "cvt." in str(op)
                    self.values[op.results[0]] = self._result(op, operands)

    def _result(self, op, operands):
        attributes = op.attributes
        match op.name:
            case "memref.load":
                return self._load(*operands)
            case "vector.load":
                assert np.all(operands[1] % 4 == 0)
                return np.stack([self._load(operands[0], operands[1] + i) for i in range(4)])
            case "nvvm.shfl.sync":
                return self._shuffle(str(attributes["kind"]), *operands[1:3])
            case "nvvm.redux.sync":
                kind = str(attributes["kind"])
                found = operands[0].min() if "umin" in kind else bits(signed(operands[0]).max())
                return np.full(LANES, found, np.uint32)
            case "llvm.inline_asm":
                return self._asm(_ptx(op), *operands)
        return self.result(op, operands)

    def _access(self, ptx, active, op, operands) -> Iterator[str]:
        """An access to memory by its address, whose upper half says which of `addressed` it is."""
        low, high, by, *words = operands
        places = [
            (lane, self.addressed[int(high[lane])], (int(low[lane]) + int(by[lane])) // 4)
            for lane in np.flatnonzero(active)
        ]
        yield "access"
        if "ld.acquire" in ptx:
            while any(
                (memory[place : place + 1] - words[0][lane]).view(np.int32)[0] < 0
                for lane, memory, place in places
            ):
                yield "spin"
        elif found := re.search(r"ld\.\S*global(\.v\d)?", ptx):
            count = int((found[1] or ".v1")[2:])
            result = np.zeros((count, LANES), np.uint32)
            for lane, memory, place in places:
                result[:, lane] = memory[place : place + count]
            self.values[op.results[0]] = result if found[1] else result[0]
        else:
            assert re.search(r"st\.\S*global", ptx), ptx
            for lane, memory, place in places:
                assert 0 <= place <= memory.size - len(words), "store out of range"
                memory[place : place + len(words)] = [word[lane] for word in words]

    def _load(self, memory, index):
        assert np.all((index >= 0) & (index < memory.size)), "load out of range"
        return memory[index]

    def _store(self, active, value, memory, index):
        value, index = value[active], index[active]
        assert np.all((index >= 0) & (index < memory.size)), "store out of range"
        memory[index] = value
        np.testing.assert_array_equal(memory[index], value, "lanes store to one address")

    def _shuffle(self, kind, value, argument):
        lane = np.arange(LANES)
        argument = argument.astype(int)
        if "up" in kind:
            return value[np.where(lane < argument, lane, lane - argument)]
        return value[lane ^ argument if "bfly" in kind else argument]

    def _asm(self, ptx, value, other=None):
        if ptx.startswith("cvt.rn.bf16x2"):
            upper, lower = (
                np.asarray(part).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
                for part in (value, other)
            )
            return (upper << np.uint32(16)) | lower
        if ptx.startswith("match.any"):
            equal = value == value[:, None]
            return np.sum(equal << np.arange(LANES), axis=1).astype(np.uint32)
        if ptx.startswith("popc"):
            return np.array([int(number).bit_count() for number in value], np.uint32)
        if ptx.startswith("mov.b32"):
            return value.copy()
        peer = self.peers[int(ptx.removeprefix("peer "))]
        own = next(memories for memories in self.peers if any(m is value for m in memories))
        return peer[[m is value for m in own].index(True)]


def run_threads(
    emit: Callable[[list, list, list], None],
    arrays: Sequence[np.ndarray] | Sequence[Sequence[np.ndarray]],
    *,
    shared: Sequence[int] = (),
    scalars: Sequence[Sequence[int]],
    warps: int,
    seed: int = 0,
    addressed: Mapping[int, np.ndarray] | None = None,
    launches: Sequence[tuple[int, int]] | None = None,
    resident: int | None = None,
) -> None:
    """Runs a cluster with a CTA for each of `scalars`, the values that the kernel passes it.

    `emit` gets refs of the arrays (uint32 or float32, written in place), refs of buffers of
    `shared` uint32 each, and the scalars. `arrays` may be a list for each CTA. `addressed` is
    memory (uint32) by the upper half of the addresses that reach it. `launches` gives the device
    and the launch of each CTA: those of a device run one after another, and at most `resident`
    CTAs of one at a time, in their order.
    """
    each = list(arrays) if isinstance(arrays[0], list) else [arrays] * len(scalars)
    with jax_mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        types = [
            ir.MemRefType.get((a.size,), f32 if a.dtype == np.float32 else i32) for a in each[0]
        ]
        types += [ir.MemRefType.get((size,), i32) for size in shared] + [i32] * len(scalars[0])
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("kernel", (types, []))
            block = function.add_entry_block()
        ends = len(each[0]), len(each[0]) + len(shared)
        with ir.InsertionPoint(block):
            refs = list(block.arguments)
            emit(refs[: ends[0]], refs[ends[0] : ends[1]], [Scalar(v) for v in refs[ends[1] :]])
            func.ReturnOp([])
        # What was in shared memory before is nobody's zeros.
        garbage = np.random.default_rng(seed)
        memories = [
            [garbage.integers(0, 2**32, size, dtype=np.uint32) for size in shared] for _ in scalars
        ]
        ctas = []
        for own, memory, numbers in zip(each, memories, scalars, strict=True):
            passed = [np.full(LANES, number, np.uint32) for number in numbers]
            values = dict(zip(block.arguments, [*own, *memory, *passed], strict=True))
            ctas.append([
                Warp(block, dict(values), first_thread=LANES * warp, threads=LANES * warps,
                     peers=memories, addressed=addressed or {})
                for warp in range(warps)
            ])  # fmt: skip
        _schedule(ctas, random.Random(seed), launches or [(0, 0)] * len(ctas), resident)


def _ptx(op) -> str:
    return ir.StringAttr(op.attributes["asm_string"]).value


def _schedule(
    ctas: list[list[Warp]],
    order: random.Random,
    launches: Sequence[tuple[int, int]],
    resident: int | None,
) -> None:
    running = [(warp, cta) for cta in ctas for warp in cta]
    everyone = [warp for warp, _ in running]
    idle_turns = 0
    while running:
        on_device = _on_device(ctas, launches, resident)
        free = [
            (warp, cta)
            for warp, cta in running
            if id(cta) in on_device
            and not (
                (warp.stopped_at == "barrier" and min(w.barriers for w in cta) < warp.barriers)
                or (warp.stopped_at == "wait" and min(w.arrivals for w in everyone) <= warp.waits)
            )
        ]
        assert free, "deadlock"
        chosen = order.choice(free)
        if not chosen[0].step():
            running.remove(chosen)
        idle_turns = idle_turns + 1 if chosen[0].stopped_at == "spin" else 0
        assert idle_turns < MOST_TURNS, "deadlock: warps wait for ever"


def _on_device(ctas, launches, resident) -> set[int]:
    """Returns the CTAs that have begun, or may begin, by their `id`."""
    left: dict[int, list[tuple[int, int]]] = {}
    for cta, (device, launch) in zip(ctas, launches, strict=True):
        if any(warp.stopped_at != "end" for warp in cta):
            left.setdefault(device, []).append((launch, id(cta)))
    return {
        cta
        for waiting in left.values()
        for launch, cta in [one for one in waiting if one[0] == min(waiting)[0]][:resident]
    }


def inlined(arg_types=(), return_type=None):  # noqa: ARG001
    """Takes the place of `plgpu.inline_mgpu` where MLIR is being built."""
    return lambda function: lambda *arguments: function(None, *arguments)
