"""Inlined code computes the same as its function, and lowers for CUDA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import compat, register_code
from pallas_kernels.unembed_stats import partials

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

ROWS, COLUMNS = 64, 16


def in_registers(shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def example(x, word, first, carry, columns=in_registers):
    """Uses every operation of the table, and comparisons and conversions of all kinds."""
    ids = first + columns(x.shape)
    words = jax.lax.broadcast_in_dim(word, x.shape, [0])
    noise = partials.noise(partials.draw_counter(words, ids), words)
    masked = jnp.where((ids < 5) | (ids == 9) & (x > 0), x, -1.0) + noise
    high = jnp.maximum(carry["high"], jnp.minimum(masked[:, :8], masked[:, 8:]))
    return carry | {"high": high, "total": carry["total"] * jnp.exp(-high) - x[:, 8:]}


def arguments():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    word = rng.integers(0, 2**32, ROWS, dtype=np.uint32)
    carry = {name: rng.normal(size=(ROWS, 8)).astype(np.float32) for name in ("high", "total")}
    return x, word, np.int32(2), carry


@dataclasses.dataclass(frozen=True, eq=False)
class NumpyFragment:
    """Has the methods of `FragmentedArray` that the tested code calls; it holds a whole array."""

    array: np.ndarray

    @property
    def registers(self):
        return self.array

    @property
    def is_signed(self):
        return None

    @classmethod
    def splat(cls, value, shape, layout=None, *, is_signed):
        return cls(np.full(shape, value, np.asarray(value).dtype))

    @classmethod
    def broadcasted_iota(cls, dtype, shape, dimension, layout, *, is_signed):
        return cls(np.indices(shape)[dimension].astype(dtype))

    def broadcast_in_dim(self, shape, dimensions, layout):
        assert dimensions == (0,)
        return NumpyFragment(np.broadcast_to(self.array[:, None], shape))

    def astype(self, dtype, *, is_signed):
        return NumpyFragment(self.array.astype(dtype))

    def select(self, yes, no):
        return NumpyFragment(np.where(self.array, yes.array, no.array))

    def max(self, other):
        return NumpyFragment(np.maximum(self.array, other.array))

    def min(self, other):
        return NumpyFragment(np.minimum(self.array, other.array))

    def exp(self, *, approx):
        return NumpyFragment(np.exp(self.array))

    def log(self, *, approx):
        return NumpyFragment(np.log(self.array))

    def __getitem__(self, index):
        return NumpyFragment(self.array[index])

    def __neg__(self):
        return NumpyFragment(-self.array)


def _binary(name):
    def method(self, other):
        return NumpyFragment(getattr(self.array, name)(other.array))

    return method


for _name in ("add", "sub", "mul", "xor", "and", "or", "rshift", "gt", "lt", "eq"):
    setattr(NumpyFragment, f"__{_name}__", _binary(f"__{_name}__"))


def test_a_jaxpr_written_out_computes_what_the_function_does(monkeypatch):
    monkeypatch.setattr(register_code, "Fragment", NumpyFragment)
    monkeypatch.setattr(register_code.mgpu_utils, "c", lambda value, dtype: dtype.type(value))
    monkeypatch.setattr(register_code.mgpu_utils, "dtype_to_ir_type", np.dtype)
    closed = jax.make_jaxpr(example)(*arguments())
    fragments = [NumpyFragment(np.asarray(leaf)) for leaf in jax.tree.leaves(arguments())]
    found = register_code._evaluate(closed.jaxpr, closed.consts, fragments)
    expected = example(*arguments(), columns=lambda shape: jnp.indices(shape)[1])
    for fragment, array in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(fragment.array, array, rtol=1e-5, atol=1e-5)


def lowered(function):
    x, word, first, carry = arguments()

    def body(x_gmem, word_gmem, first_gmem, high_gmem, total_gmem):
        def load(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        by_row, wide = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
        start = {name: plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), wide) for name in carry}
        results = register_code.inline(
            function, load(x_gmem, wide), load(word_gmem, by_row), first_gmem[0], start
        )
        high_gmem[...], total_gmem[...] = results["high"], results["total"]

    kernel = compat.kernel(
        body, out_type=[jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)] * 2, grid=(), grid_names=()
    )
    traced = jax.jit(kernel).trace(x, word, first.reshape(1))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_every_operation_lowers_for_cuda():
    assert "mosaic_gpu" in lowered(example)


def test_an_operation_that_is_not_in_the_table_is_named():
    with pytest.raises(NotImplementedError, match="sin in a function of registers"):
        lowered(lambda x, word, first, carry: carry | {"high": jnp.sin(x[:, :8])})
