"""Kernels are exported once for each signature, and programs compute the same as the kernel."""

import functools
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import devices

import pallas_kernels
from pallas_kernels import lowered_once, tiles
from pallas_kernels.hopper import compat


class Kernel:
    """A stand-in for a kernel that counts how often it is traced."""

    __name__ = "kernel"

    def __init__(self):
        self.traces = 0

    def __call__(self, x, pair, *, rows, scale, name=None, sizes=()):
        self.traces += 1
        first, second = pair
        total = x * scale + first
        if second is not None:
            total = total - second
        return {"total": total, "rows": sum(row * (i + 1) for i, row in enumerate(rows.values()))}


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(lowered_once, "_PLATFORMS", ("cpu",))
    monkeypatch.setattr(lowered_once, "_exported", {})
    return Kernel()


def arrays(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_gives_what_the_kernel_gives_in_every_program(kernel):
    x, first, second = (arrays(seed, 3, 4) for seed in range(3))
    rows = {"b": arrays(4, 2), "a": arrays(5, 2)}

    def program(factor, x, first, second, rows):
        return lowered_once.call(kernel, factor * x, (first, second), rows=rows, scale=2.0)

    for factor in (1.0, 3.0):  # two programs
        out = jax.jit(program, static_argnums=0)(factor, x, first, second, rows)
        np.testing.assert_allclose(out["total"], 2 * factor * x + first - second, rtol=1e-6)
        np.testing.assert_allclose(out["rows"], rows["a"] + 2 * rows["b"], rtol=1e-6)
    assert kernel.traces == 1


@pytest.mark.parametrize(
    "change",
    [
        {"x": arrays(0, 4, 4)},
        {"x": arrays(0, 3, 4, dtype=jnp.bfloat16)},
        {"pair": (arrays(1, 3, 4), None)},
        {"scale": 2},  # not 2.0
        {"name": "other"},
        {"sizes": (1, 2)},
        {"rows": {"a": arrays(0, 2)}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_shapes_trees_and_options_are_other_kernels(kernel, change):
    given = {
        "x": arrays(0, 3, 4),
        "pair": (arrays(1, 1, 4), arrays(2, 1, 4)),
        "rows": {},
        "scale": 2.0,
    }

    def call(options):
        x, pair = options.pop("x"), options.pop("pair")
        return lowered_once.call(kernel, x, pair, **options)

    call(given.copy())
    expected = Kernel()(**given | change)
    changed = call(given | change)
    assert kernel.traces == 2
    for one, other in zip(*map(jax.tree.leaves, (changed, expected)), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-2
        )
    call(given | change)
    call(given.copy())
    assert kernel.traces == 2


def test_what_was_cleared_is_lowered_anew(kernel):
    x = arrays(0, 3, 4)
    for traces in (1, 2):
        for _ in range(2):
            lowered_once.call(kernel, x, (x, None), rows={}, scale=1.0)
        assert kernel.traces == traces
        lowered_once.clear()


def test_a_kernel_may_call_a_kernel(kernel):
    def outer(x):
        return lowered_once.call(kernel, x, (x, None), rows={}, scale=3.0)["total"]

    x = arrays(0, 3, 4)
    np.testing.assert_allclose(lowered_once.call(outer, x), 4 * x, rtol=1e-6)


def test_threads_that_compile_at_once_share_one(kernel):
    x, barrier = arrays(0, 3, 4), threading.Barrier(4)

    def compile_one(factor):
        def program(x):
            return lowered_once.call(kernel, x * factor, (x, None), rows={}, scale=1.0)

        barrier.wait()
        jax.jit(program).lower(x)

    threads = [threading.Thread(target=compile_one, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernel.traces == 1


@pytest.fixture
def on_hopper(monkeypatch):
    """Lets ops choose as on a Hopper GPU, and forgets their exported kernels afterwards."""
    if not compat.supported():
        pytest.skip(f"needs jax >= {compat.MIN_JAX_VERSION}")
    devices.pretend(monkeypatch, devices.HOPPER)
    monkeypatch.setattr(lowered_once, "_exported", {})


@pytest.mark.usefixtures("on_hopper")
def test_another_tile_is_another_kernel_once_the_old_one_is_cleared():
    """`scripts/tune_kernels.py` relies on it: it times one tile after the other."""
    shapes = [((64, 4, 64), jnp.bfloat16), ((3, 2, 4, 64, 64), jnp.bfloat16)]
    shapes += [((2,), jnp.int32), ((1,), jnp.int32), ((1,), jnp.int32), ((1, 2), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    options = {"visibility": "full", "block_size": 8, "scale": 0.1}

    def lookups(kv_tokens):
        """Returns how often lowering the kernel looked up its tile."""
        lookup = mock.Mock(return_value={"kv_tokens": kv_tokens, "stages": 2, "persistent": False})
        jax.clear_caches()
        with mock.patch.object(tiles, "lookup", lookup):
            op = functools.partial(pallas_kernels.extend_attention, **options)
            jax.jit(op).trace(*arguments).lower(lowering_platforms=("cuda",))
        return lookup.call_count

    assert [lookups(64), lookups(128)] == [1, 0]
    lowered_once.clear()
    assert lookups(128) == 1


@pytest.mark.usefixtures("on_hopper")
def test_a_mosaic_kernel_keeps_its_code_its_name_and_its_scope():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 512), (256, 512)))

    def program(x, w):
        with jax.named_scope("mlp"):
            return pallas_kernels.dense_matmul(x, w)

    lowered = jax.jit(program).trace(x, w).lower(lowering_platforms=("cuda",))
    text = lowered.as_text(debug_info=True)
    assert text.count("mosaic_gpu_v") == 1
    assert "mlp" in text and "dense_matmul" in text
    assert len(lowered_once._exported) == 1
