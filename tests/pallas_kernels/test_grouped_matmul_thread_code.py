"""Counting by expert equals its formula, thread by thread.

The Mosaic GPU interpreter cannot run `thread_code`. `run_threads` can: it builds the MLIR that a
kernel would inline and interprets it, a warp at a time over numpy vectors of 32 lanes. Between
barriers the warps run in random order, so a barrier that is missing shows as a wrong result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic_gpu import compat

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from jax._src.interpreters import mlir as jax_mlir
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, llvm

from pallas_kernels.mosaic_gpu import expert_counts, expert_tiles, thread_code

LANES = 32
UNWRITTEN = 0x7FFFFFF0


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
    """The part of a scalar FragmentedArray that `thread_code.scalar` reads."""

    def __init__(self, value: ir.Value):
        self.registers = np.array(value, dtype=object)


class Warp:
    """Interprets a block for 32 threads; `step` runs to the next barrier and returns its kind."""

    def __init__(self, block: ir.Block, values: dict, *, first_thread: int, threads: int, peers):
        self.values, self.threads, self.peers = values, threads, peers
        self.thread = np.arange(first_thread, first_thread + LANES, dtype=np.int64)
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
                case name:
                    if name.startswith("nvvm") or name == "llvm.inline_asm":
                        assert active.all() or "popc" in str(op)
                    self.values[op.results[0]] = self._result(op, operands)

    def _result(self, op, operands):
        name, attributes = op.name, op.attributes
        if name in PURE:
            return PURE[name](*operands)
        match name:
            case "arith.constant":
                return self._constant(op)
            case "arith.cmpi":
                return COMPARISONS[ir.IntegerAttr(attributes["predicate"]).value](*operands)
            case "arith.bitcast":
                is_float = isinstance(op.results[0].type, ir.F32Type)
                return operands[0].view(np.float32 if is_float else np.uint32)
            case "gpu.thread_id":
                return self.thread if "<x>" in str(attributes["dimension"]) else 0 * self.thread
            case "gpu.block_dim":
                along = self.threads if "<x>" in str(attributes["dimension"]) else 1
                return np.full(LANES, along, np.int64)
            case "memref.load":
                return self._load(*operands)
            case "vector.load":
                assert np.all(operands[1] % 4 == 0)
                return np.stack([self._load(operands[0], operands[1] + i) for i in range(4)])
            case "vector.extract":
                return operands[0][attributes["static_position"][0]]
            case "nvvm.shfl.sync":
                return self._shuffle(str(attributes["kind"]), *operands[1:3])
            case "nvvm.redux.sync":
                kind = str(attributes["kind"])
                found = operands[0].min() if "umin" in kind else bits(signed(operands[0]).max())
                return np.full(LANES, found, np.uint32)
            case "llvm.inline_asm":
                return self._asm(ir.StringAttr(attributes["asm_string"]).value, operands[0])
        raise NotImplementedError(str(op))

    def _constant(self, op):
        value, kind = op.attributes["value"], op.results[0].type
        if isinstance(kind, ir.F32Type):
            return np.full(LANES, ir.FloatAttr(value).value, np.float32)
        if isinstance(kind, ir.IndexType):
            return np.full(LANES, ir.IntegerAttr(value).value, np.int64)
        assert kind.width == 32
        return np.full(LANES, ir.IntegerAttr(value).value & 0xFFFFFFFF, np.uint32)

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

    def _asm(self, ptx, value):
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
    arrays: Sequence[np.ndarray],
    *,
    shared: Sequence[int] = (),
    scalars: Sequence[Sequence[int]],
    warps: int,
    seed: int = 0,
) -> None:
    """Runs a cluster with a CTA for each of `scalars`, the values that the kernel passes it.

    `emit` gets refs of the arrays (uint32 or float32, written in place), refs of buffers of
    `shared` uint32 each, and the scalars.
    """
    with jax_mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        types = [
            ir.MemRefType.get((a.size,), f32 if a.dtype == np.float32 else i32) for a in arrays
        ]
        types += [ir.MemRefType.get((size,), i32) for size in shared] + [i32] * len(scalars[0])
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("kernel", (types, []))
            block = function.add_entry_block()
        ends = len(arrays), len(arrays) + len(shared)
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
        for memory, numbers in zip(memories, scalars, strict=True):
            passed = [np.full(LANES, number, np.uint32) for number in numbers]
            values = dict(zip(block.arguments, [*arrays, *memory, *passed], strict=True))
            ctas.append([
                Warp(block, dict(values), first_thread=LANES * warp, threads=LANES * warps,
                     peers=memories)
                for warp in range(warps)
            ])  # fmt: skip
        _schedule(ctas, random.Random(seed))


def _schedule(ctas: list[list[Warp]], order: random.Random) -> None:
    running = [(warp, cta) for cta in ctas for warp in cta]
    everyone = [warp for warp, _ in running]
    while running:
        free = [
            (warp, cta)
            for warp, cta in running
            if not (
                (warp.stopped_at == "barrier" and min(w.barriers for w in cta) < warp.barriers)
                or (warp.stopped_at == "wait" and min(w.arrivals for w in everyone) <= warp.waits)
            )
        ]
        assert free, "deadlock"
        chosen = order.choice(free)
        if not chosen[0].step():
            running.remove(chosen)


def inlined(arg_types=(), return_type=None):  # noqa: ARG001
    """Takes the place of `plgpu.inline_mgpu` where MLIR is being built."""
    return lambda function: lambda *arguments: function(None, *arguments)


@pytest.fixture
def inline(monkeypatch):
    def peer(ref, cta):
        return llvm.inline_asm(ref.type, [ref], f"peer {cta}", "=r,r")

    monkeypatch.setattr(plgpu, "inline_mgpu", inlined)
    monkeypatch.setattr(thread_code, "of_peer", peer)


def routing(tokens, choices, experts, *, is_skewed=False):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-2, experts + 2, (tokens, choices)).astype(np.int32)
    if is_skewed:
        ids[rng.random(ids.shape) < 0.7] = experts // 2
    return ids, rng.random(tokens) < 0.8


def unwritten(*sizes):
    return [np.full(size, UNWRITTEN, np.uint32) for size in sizes]


@pytest.mark.parametrize("has_valid", [False, True], ids=["all-valid", "some-valid"])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "is_skewed", "ctas"),
    [(5, 3, 4, False, 1), (200, 8, 256, True, 2), (70, 8, 600, False, 1), (300, 8, 40, True, 4)],
    ids=str,
)
def test_the_list_of_rows(tokens, choices, experts, is_skewed, ctas, has_valid, inline):
    ids, valid = routing(tokens, choices, experts, is_skewed=is_skewed)
    valid = jnp.asarray(valid) if has_valid else None
    rows = expert_tiles.most_rows(ids.size, experts)
    options = {"num_experts": experts, "rows": rows, "tile_rows": 24, "has_shared": True}
    expected, listed = expert_tiles.list_tokens(jnp.asarray(ids), valid, **options, interpret=True)
    counting = expert_tiles.counting_of_list(tokens, choices, **options_of_counting(options))
    assert counting.ctas == ctas
    operands = [bits(ids).reshape(-1), *([] if valid is None else [bits(valid)])]
    entries = rows + -(-tokens // 8) * 8
    written = unwritten(entries, ids.size, *counting.lists())

    def emit(refs, shared, scalars):
        expert_tiles.place_and_list(
            refs[: len(operands)], refs[len(operands) :], shared, *scalars, counting, rows
        )

    run_threads(
        emit,
        [*operands, *written],
        shared=counting.scratch(),
        scalars=[[cta] for cta in range(ctas)],
        warps=counting.warps,
    )
    listed = np.asarray(listed)
    np.testing.assert_array_equal(signed(written[0]), np.where(listed < 0, UNWRITTEN, listed))
    check_segments(written[1:], expected)


def options_of_counting(options):
    return {name: value for name, value in options.items() if name != "rows"}


def check_segments(written, expected):
    wanted = (expected.places, expected.starts, expected.counts, expected.tile_ends)
    for got, want in zip(written, wanted, strict=True):
        np.testing.assert_array_equal(signed(got), want)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts"),
    [(5, 3, 4), (32, 8, 256), (150, 8, 256), (100, 2, 600)],
    ids=str,
)
@pytest.mark.parametrize(("token", "block"), [(0, 0), (3, 0), (4, 1)], ids=str)
def test_the_places_of_one_token(tokens, choices, experts, token, block, inline):
    ids, valid = routing(tokens, choices, experts)
    counting = expert_counts.Counting(
        tokens=tokens, choices=choices, num_experts=experts, tile_rows=16, has_shared=True, warps=4
    )
    operands = [bits(ids).reshape(-1), bits(valid)]
    # The token's places are in shared memory on a GPU; here they can be read afterwards.
    written = unwritten(ids.size, *counting.lists(), choices)

    def emit(refs, shared, scalars):
        expert_tiles.place_token(refs[:2], refs[2:], shared, *scalars, counting)

    run_threads(
        emit, [*operands, *written], shared=counting.scratch(), scalars=[[token, block]], warps=4
    )
    places, *lists = expert_counts.reference(
        jnp.asarray(ids.reshape(-1)), jnp.asarray(valid), counting=counting
    )
    mine = np.arange(ids.size) // choices == token
    np.testing.assert_array_equal(signed(written[-1]), places[mine])
    seen = np.where(mine & (block == 0), places, UNWRITTEN)
    np.testing.assert_array_equal(signed(written[0]), seen)
    for got, want in zip(written[1:-1], lists, strict=True):
        is_first = (token, block) == (0, 0)
        np.testing.assert_array_equal(signed(got), want if is_first else UNWRITTEN)
