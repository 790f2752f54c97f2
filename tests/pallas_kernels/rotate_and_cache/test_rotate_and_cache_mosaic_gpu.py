"""The kernel that rotates q and k and writes K,V equals separate steps, and lowers for CUDA.

The interpreter runs the kernel without its threads' code: the pool in place, dropped writes, rows.
The threads' code is MLIR; `run_threads` interprets it (`lane_interpreter`), all threads at once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import marks

import pallas_kernels
from pallas_kernels.hopper import compat
from pallas_kernels.rotate_and_cache import mosaic_gpu
from pallas_kernels.rotate_and_cache.mosaic_gpu import Tile

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from support import kernel_interpreter
from support.lane_interpreter import Interpreter, Scalar

from pallas_kernels.hopper import lane_code

EPS = 1e-6
# name: (N, K, H, rotary dims, bias, norms)
SHAPES = {
    "llada": (4, 4, 128, 128, False, False),
    "dream": (7, 1, 128, 128, True, False),
    "mini": (4, 2, 128, 64, False, True),
    "everything": (3, 1, 128, 32, True, True),
    "partial": (5, 2, 128, 96, False, False),
    "head-64": (3, 2, 64, 64, False, True),
    "head-64-partial": (2, 1, 64, 16, False, False),
    "head-256": (2, 1, 256, 128, True, True),
    "head-512": (2, 1, 512, 512, False, True),
    "head-512-partial": (1, 1, 512, 64, False, True),
}
SERVED = {
    "LLaDA-8B": (32, 32, 128, 128, False, False),
    "Dream-7B": (28, 4, 128, 128, True, False),
    "LLaDA2.0-mini": (16, 4, 128, 64, False, True),
}


def bits(array):
    return np.asarray(array).view(np.uint16)


def make_case(shape, T, *, parts=1, pages=3, page_size=32, seed=0, dropped=()):
    """Returns (the kernel's arguments, its options); `dropped` tokens have no kv_index."""
    N, K, H, rotary_dim, has_bias, has_norm = shape
    rng = np.random.default_rng(seed)

    def normal(*of):
        return jnp.asarray(rng.normal(size=of), jnp.bfloat16)

    width = (N + 2 * K) * H
    angles = rng.uniform(0, 6, (T, rotary_dim // 2)).astype(np.float32)
    kv_indices = rng.permutation(pages * page_size)[:T].astype(np.int32)
    kv_indices[list(dropped)] = pages * page_size + np.arange(len(dropped)) * 7
    return (
        tuple(normal(T, width) for _ in range(parts)),
        normal(width) if has_bias else None,
        normal(H) if has_norm else None,
        normal(H) if has_norm else None,
        jnp.cos(angles),
        jnp.sin(angles),
        normal(pages, 2, K, page_size, H),
        jnp.asarray(kv_indices),
    ), {"num_query_heads": N, "num_kv_heads": K, "eps": EPS}


def expected(arguments, options):
    """Returns q and pool by separate steps, op by op: within a jit XLA may round less."""
    qkv, bias, q_weight, k_weight, cos, sin, pool, kv_indices = arguments
    N, K, H = options["num_query_heads"], options["num_kv_heads"], pool.shape[-1]
    total = functools.reduce(jnp.add, qkv)
    if bias is not None:
        total = total + bias
    heads = total.reshape(len(total), N + 2 * K, H)
    q, k, v = heads[:, :N], heads[:, N : N + K], np.asarray(heads[:, N + K :])
    if q_weight is not None:
        q = pallas_kernels.rms_norm(q, q_weight, EPS)
        k = pallas_kernels.rms_norm(k, k_weight, EPS)
    k = np.asarray(pallas_kernels.apply_rope(k, cos, sin))
    written = np.array(pool)
    for token, kv_index in enumerate(np.asarray(kv_indices)):
        page, offset = divmod(int(kv_index), pool.shape[3])
        if page < pool.shape[0]:
            written[page, 0, :, offset], written[page, 1, :, offset] = k[token], v[token]
    return pallas_kernels.apply_rope(q, cos, sin), written


def assert_same(ours, theirs, *, exact=True):
    """Asserts equality, or without `exact` equality up to one rounding of bfloat16.

    Sums and contractions in another order may move a value by one rounding, and a rotation
    subtracts two of these values of order one.
    """
    if exact:
        np.testing.assert_array_equal(bits(ours), bits(theirs))
        return
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    np.testing.assert_allclose(ours, theirs, rtol=2**-6, atol=2**-6)
    assert (ours != theirs).mean() < 0.01


class Threads(Interpreter):
    """Interprets a block for all threads of all CTAs at once."""

    def __init__(self, block: ir.Block, values: dict, *, ctas: int, threads: int):
        thread = np.arange(ctas * threads, dtype=np.int64) % threads
        super().__init__(values, thread=thread, threads=threads)
        self.everyone = np.arange(ctas * threads)
        self.written: list[tuple[int, np.ndarray]] = []  # (address of a memory, flat places)
        self._run(block, np.ones(self.thread.size, bool))

    def _run(self, block: ir.Block, active: np.ndarray) -> None:
        for view in block.operations:
            op = view.operation
            operands = [self.values[operand] for operand in op.operands]
            match op.name:
                case "vector.store":
                    self._store(active, *operands)
                case "scf.if":
                    self._run(op.regions[0].blocks[0], active & operands[0])
                case "scf.yield" | "func.return":
                    pass
                case name:
                    if name == "nvvm.shfl.sync":
                        assert active.all()
                    self.values[op.results[0]] = self._result(op, operands)

    def _result(self, op, operands):
        attributes = op.attributes
        match op.name:
            case "arith.extf":
                return operands[0].astype(np.float32)
            case "arith.truncf":
                return operands[0].astype(jnp.bfloat16)
            case "math.fma":  # a product is exact in 64 bits, so two roundings are very rare
                a, b, c = (operand.astype(np.float64) for operand in operands)
                return (a * b + c).astype(np.float32)
            case "math.rsqrt":
                return (1 / np.sqrt(operands[0].astype(np.float64))).astype(np.float32)
            case "memref.load":
                return operands[0][self._inside(*operands)]
            case "vector.load":
                assert ir.IntegerAttr(attributes["alignment"]).value == 16
                return np.stack([operands[0][at] for at in self._pieces(*operands)])
            case "vector.broadcast":
                return operands[0]
            case "nvvm.shfl.sync":
                assert "bfly" in str(attributes["kind"])
                (distance,) = set(operands[2])
                return operands[1][self.everyone ^ int(distance)]
        return self.result(op, operands)

    @staticmethod
    def _inside(memory, *index):
        for place, size in zip(index, memory.shape, strict=True):
            assert np.all((place >= 0) & (place < size)), "access out of range"
        return index

    def _pieces(self, memory, *index):
        """Returns the indices of the 8 values of a vector access."""
        *outer, first = index
        assert np.all(first % 8 == 0)
        return [self._inside(memory, *outer, first + place) for place in range(8)]

    def _store(self, active, value, memory, *index):
        index = [np.broadcast_to(i, active.shape)[active] for i in index]
        for of_piece, at in zip(value, self._pieces(memory, *index), strict=True):
            memory[tuple(at)] = of_piece[active]
            self.written.append((id(memory), np.ravel_multi_index(at, memory.shape)))


def run_threads(arguments, options, *, tile=None):
    """Returns (q, pool) as the kernel's threads write them; parts of q that none writes are NaN."""
    qkv, bias, q_weight, k_weight, cos, sin, pool, kv_indices = arguments
    plan = mosaic_gpu._plan(*arguments, **options, tile=tile)
    q = jnp.full((plan.tokens, plan.num_query_heads, plan.head_dim), jnp.nan, pool.dtype)
    optional = [array for array in (bias, q_weight, k_weight) if array is not None]
    arrays = [np.array(array) for array in (*qkv, cos, sin, kv_indices, pool, *optional, q)]
    place_of_slots, place_of_pool = len(qkv) + 2, len(qkv) + 3
    arrays[place_of_slots] = arrays[place_of_slots].view(np.uint32)
    with jax_mlir.make_ir_context(), ir.Location.unknown(), np.errstate(all="ignore"):
        names = {"float32": ir.F32Type, "bfloat16": ir.BF16Type}
        i32 = ir.IntegerType.get_signless(32)
        types = [
            ir.MemRefType.get(a.shape, names[a.dtype.name].get() if a.dtype.name in names else i32)
            for a in arrays
        ]
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("kernel", ([*types, i32], []))
            block = function.add_entry_block()
        with ir.InsertionPoint(block):
            *refs, cta = block.arguments
            mosaic_gpu.rotate_rows(refs, lane_code.scalar(Scalar(cta)), plan)
            func.ReturnOp([])
        threads = 32 * mosaic_gpu._WARPS
        ctas = np.repeat(np.arange(plan.ctas, dtype=np.uint32), threads)
        values = dict(zip(block.arguments, [*arrays, ctas], strict=True))
        written = Threads(block, values, ctas=plan.ctas, threads=threads).written
    for memory in {address for address, _ in written}:
        places = np.concatenate([places for address, places in written if address == memory])
        assert places.size == np.unique(places).size, "two threads write one value"
    return arrays[-1], arrays[place_of_pool]


@pytest.mark.parametrize("parts", marks.every(2, [1, 2]))
@pytest.mark.parametrize("shape", SHAPES)
def test_interpreted_kernel_equals_the_steps_apart(shape, parts):
    arguments, options = make_case(SHAPES[shape], 9, parts=parts, dropped=(3, 8))
    q, pool = kernel_interpreter.run(mosaic_gpu.rotate_and_cache, *arguments, **options)
    expected_q, expected_pool = expected(arguments, options)
    exact = parts == 1 and not SHAPES[shape][-1]
    assert_same(q, expected_q, exact=exact)
    assert_same(pool, expected_pool, exact=exact)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("heads_per_thread", marks.every(2, [1, 2, 3, 8]))
@pytest.mark.parametrize("T", [1, 13])
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_equal_the_steps_apart(shape, T, heads_per_thread, parts):
    arguments, options = make_case(SHAPES[shape], T, parts=parts, dropped=(3, 8) if T > 8 else ())
    tile = Tile(heads_per_thread=heads_per_thread)
    q, pool = run_threads(arguments, options, tile=tile)
    expected_q, expected_pool = expected(arguments, options)
    assert_same(q, expected_q, exact=False)
    assert_same(pool, expected_pool, exact=False)
    # Values of v are unchanged, and places without a token keep their bits.
    written = np.zeros(pool.shape[:1] + pool.shape[3:4], bool)
    kv_indices = np.asarray(arguments[-1])
    written.reshape(-1)[kv_indices[kv_indices < written.size]] = True
    np.testing.assert_array_equal(bits(pool[:, 1]), bits(expected_pool[:, 1]))
    untouched = ~written[:, None, None, :]
    np.testing.assert_array_equal(
        bits(pool)[np.broadcast_to(untouched, pool.shape[:4])],
        bits(arguments[-2])[np.broadcast_to(untouched, pool.shape[:4])],
    )


@pytest.mark.parametrize("shape", ["llada", "dream", "mini", "everything"])
def test_a_token_of_nan_touches_its_own_rows_alone(shape):
    arguments, options = make_case(SHAPES[shape], 7, dropped=(2,))
    N, K, H, *_ = SHAPES[shape]
    clean_q, clean_pool = run_threads(arguments, options)
    (qkv,) = arguments[0]
    dirty = ((qkv.at[jnp.array([2, 5])].set(jnp.nan),), *arguments[1:])
    for run in (run_threads, run_interpreted):
        q, pool = run(dirty, options)
        others = [0, 1, 3, 4, 6]
        if run is run_threads:
            np.testing.assert_array_equal(bits(q)[others], bits(clean_q)[others])
        assert np.isnan(np.asarray(q, np.float32)[[2, 5]]).all()
        page, offset = divmod(int(arguments[-1][5]), 32)
        found = np.isnan(np.asarray(pool, np.float32))
        assert found[page, :, :, offset].all() and found.sum() == 2 * K * H
    assert not np.isnan(np.asarray(clean_pool, np.float32)).any()


def run_interpreted(arguments, options):
    return kernel_interpreter.run(mosaic_gpu.rotate_and_cache, *arguments, **options)


@pytest.mark.parametrize("shape", ["llada", "dream", "mini"])
def test_a_row_does_not_depend_on_tokens_beside_it_nor_on_the_tile(shape):
    arguments, options = make_case(SHAPES[shape], 11)
    q, pool = run_threads(arguments, options, tile=Tile(heads_per_thread=1))
    other_q, other_pool = run_threads(arguments, options, tile=Tile(heads_per_thread=3))
    np.testing.assert_array_equal(bits(q), bits(other_q))
    np.testing.assert_array_equal(bits(pool), bits(other_pool))
    (qkv,), *constants, cos, sin, pool_before, kv_indices = arguments
    alone = ((qkv[4:5],), *constants, cos[4:5], sin[4:5], pool_before, kv_indices[4:5])
    np.testing.assert_array_equal(bits(run_threads(alone, options)[0]), bits(q[4:5]))


def test_infinities_and_signed_zeros_of_values_pass_unchanged():
    arguments, options = make_case(SHAPES["mini"], 4)
    N, K, H, *_ = SHAPES["mini"]
    odd = jnp.asarray([-0.0, jnp.inf, -jnp.inf, jnp.nan] * (H // 4), jnp.bfloat16)
    (qkv,) = arguments[0]
    qkv = qkv.at[:, (N + K) * H :].set(jnp.tile(odd, K))
    _, pool = run_threads(((qkv,), *arguments[1:]), options)
    for kv_index in np.asarray(arguments[-1]):
        page, offset = divmod(int(kv_index), 32)
        np.testing.assert_array_equal(bits(pool)[page, 1, :, offset], np.tile(bits(odd), (K, 1)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("T", [1, 8, 32, 128, 384, 2048, 8192])
@pytest.mark.parametrize("model", SERVED)
def test_serving_shapes_lower_for_cuda(model, T, dtype):
    text = lowered(model, T, dtype=dtype)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("heads_per_thread", range(1, 9))
def test_every_tile_lowers_for_cuda(heads_per_thread):
    tile = Tile(heads_per_thread=heads_per_thread)
    for model in SERVED:
        lowered(model, 32, tile=tile, parts=4)


@pytest.mark.parametrize(
    ("H", "rotary_dim"), [(64, 64), (64, 16), (256, 256), (256, 64), (512, 512)]
)
def test_other_heads_lower_for_cuda(H, rotary_dim):
    lowered((3, 1, H, rotary_dim, True, True), 40)


def lowered(model, T, *, parts=1, dtype=jnp.bfloat16, tile=None, pages=40, page_size=64) -> str:
    N, K, H, rotary_dim, has_bias, has_norm = SERVED.get(model, model)
    width = (N + 2 * K) * H
    weight = jax.ShapeDtypeStruct((H,), dtype) if has_norm else None
    angle = jax.ShapeDtypeStruct((T, rotary_dim // 2), jnp.float32)

    def run(*arguments):
        return mosaic_gpu.rotate_and_cache(
            *arguments, num_query_heads=N, num_kv_heads=K, eps=EPS, tile=tile
        )

    traced = jax.jit(run, donate_argnums=6).trace(
        (jax.ShapeDtypeStruct((T, width), dtype),) * parts,
        jax.ShapeDtypeStruct((width,), dtype) if has_bias else None,
        weight,
        weight,
        angle,
        angle,
        jax.ShapeDtypeStruct((pages, 2, K, page_size, H), dtype),
        jax.ShapeDtypeStruct((T,), jnp.int32),
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_pool_is_an_output_that_aliases_its_argument():
    """XLA decides whether it copies the pool; it has never copied a donated pool in a loop."""
    text = lowered("LLaDA-8B", 32)
    assert "tf.aliasing_output = 1" in text
    (call,) = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert "output_tuple_indices = [1], operand_index = 4" in call


def test_what_does_not_fit_is_refused_with_the_shapes():
    arguments, options = make_case(SHAPES["mini"], 4)
    with pytest.raises(
        ValueError, match=r"qkv\[0\] must be bfloat16\(4, 1280\), .*bfloat16\(4, 1024\)"
    ):
        mosaic_gpu.rotate_and_cache(*arguments, **(options | {"num_query_heads": 6}))
    with pytest.raises(ValueError, match="q and k have both a norm or none"):
        mosaic_gpu.rotate_and_cache(*arguments[:3], None, *arguments[4:], **options)
    with pytest.raises(ValueError, match=r"kv_indices must be int32\(4,\)"):
        mosaic_gpu.rotate_and_cache(*arguments[:-1], arguments[-1][:3], **options)
    with pytest.raises(ValueError, match="heads_per_thread=9"):
        Tile(heads_per_thread=9)


def test_what_the_kernel_cannot_serve_has_a_reason():
    served = {"dtype": jnp.bfloat16, "head_dim": 128, "rotary_dim": 128}
    assert mosaic_gpu.why_not(**served) is None
    assert "16-bit" in mosaic_gpu.why_not(**(served | {"dtype": jnp.float32}))
    assert "head_dim" in mosaic_gpu.why_not(**(served | {"head_dim": 80}))
    assert "rotary" in mosaic_gpu.why_not(**(served | {"rotary_dim": 24}))
    assert "rotary" in mosaic_gpu.why_not(**(served | {"rotary_dim": 256}))


def test_tiles_take_a_token_in_fewer_warps_as_tokens_grow():
    for N, K, H, *_ in SERVED.values():
        heads = [
            mosaic_gpu.tile_for(tokens=T, num_heads=N + 2 * K, head_dim=H).heads_per_thread
            for T in (8, 32, 128, 512, 2048, 8192)
        ]
        assert heads[0] == 1 and heads == sorted(heads) and heads[-1] > 1
