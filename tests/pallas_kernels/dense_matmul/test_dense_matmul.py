"""The dense matmul op where XLA serves it: numbers, gradients, choices and refusals."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import devices

import pallas_kernels
from pallas_kernels.dense_matmul import api
from pallas_kernels.hopper import compat

SHAPE = {"dtype": jnp.bfloat16, "tokens": 128, "columns": 4096, "contraction": 4096}


def arrays(tokens, columns, contraction, dtype=jnp.float32):
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, contraction))
    w = rng.normal(size=(columns, contraction)) * contraction**-0.5
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("tokens", [1, 13, 200])
def test_xla_gives_one_array_that_equals_numpy(tokens):
    x, w = arrays(tokens, 48, 40)
    (out,) = pallas_kernels.dense_matmul(x, w, implementation="xla")
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_swiglu_takes_gate_rows_first():
    x, w = arrays(5, 48, 40)
    gate, up = np.split(np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, 2, axis=1)
    out = pallas_kernels.swiglu_matmul(x, w, implementation="xla")
    np.testing.assert_allclose(out, gate * sigmoid(gate) * up, rtol=1e-4, atol=1e-6)


def test_results_have_the_dtype_of_what_goes_in():
    x, w = arrays(5, 48, 64, jnp.bfloat16)
    (out,) = pallas_kernels.dense_matmul(x, w, implementation="xla")
    assert out.dtype == pallas_kernels.swiglu_matmul(x, w, implementation="xla").dtype == x.dtype


def test_weights_are_not_transposed_in_memory():
    x, w = arrays(8, 64, 48)
    for op in (pallas_kernels.dense_matmul, pallas_kernels.swiglu_matmul):
        text = jax.jit(lambda x, w, op=op: op(x, w, implementation="xla")).lower(x, w).as_text()
        assert "dot_general" in text
        assert "transpose" not in text


def test_xla_is_differentiable():
    """Compares with hand-written derivatives of sum(x @ w.T) and of silu(g) * u."""
    x, w = arrays(3, 8, 6)
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)

    def loss(x, w):
        return jnp.sum(pallas_kernels.dense_matmul(x, w, implementation="xla")[0])

    of_x, of_w = jax.grad(loss, argnums=(0, 1))(x, w)
    np.testing.assert_allclose(of_x, np.tile(w64.sum(0), (3, 1)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of_w, np.tile(x64.sum(0), (8, 1)), rtol=1e-4, atol=1e-6)

    def swiglu_loss(x, w):
        return jnp.sum(pallas_kernels.swiglu_matmul(x, w, implementation="xla"))

    of_x, of_w = jax.grad(swiglu_loss, argnums=(0, 1))(x, w)
    gate, up = np.split(x64 @ w64.T, 2, axis=1)
    of_gate = up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))
    of_both = np.concatenate([of_gate, gate * sigmoid(gate)], axis=1)
    np.testing.assert_allclose(of_x, of_both @ w64, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_w, of_both.T @ x64, rtol=1e-4, atol=1e-5)


def test_auto_takes_the_kernel_for_few_tokens_on_hopper(monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)
    choose = api.choose
    assert choose(**SHAPE).implementation == "mosaic_gpu"


WIDE = {  # name: sizes at which the kernel was measured to beat XLA
    "llada-down": {"tokens": 192, "columns": 4096, "contraction": 12288},
    "llada-down-between": {"tokens": 144, "columns": 4096, "contraction": 12288},
    "llada-gate-up": {"tokens": 384, "columns": 12288, "contraction": 4096, "swiglu": True},
    "llada-qkv": {"tokens": 192, "columns": 12288, "contraction": 4096},
    "dream-gate-up": {"tokens": 192, "columns": 18944, "contraction": 3584, "swiglu": True},
}


@pytest.mark.parametrize("name", WIDE)
def test_more_tokens_take_the_wide_kernel_at_measured_shapes_on_hopper_only(monkeypatch, name):
    shape = {"dtype": jnp.bfloat16} | WIDE[name]
    devices.pretend(monkeypatch, devices.HOPPER)
    assert api.choose(**shape).implementation == "mosaic_gpu"
    a100 = dataclasses.replace(devices.HOPPER, compute_capability=(8, 0))
    for other in (a100, devices.CPU):
        devices.pretend(monkeypatch, other)
        assert api.choose(**shape).implementation == "xla"


def test_sizes_between_measured_wins_where_xla_won_go_to_xla(monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)
    shape = {"dtype": jnp.bfloat16, "columns": 18944, "contraction": 3584, "swiglu": True}
    chosen = [api.choose(tokens=tokens, **shape).implementation for tokens in (192, 256, 384)]
    assert chosen == ["mosaic_gpu", "xla", "mosaic_gpu"]


@pytest.mark.skipif(not compat.supported(), reason="needs the Mosaic GPU of a newer jax")
def test_the_ops_call_the_kernel_of_their_number_of_tokens(monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)

    def lowered(op, tokens, columns, contraction):
        shapes = (tokens, contraction), (columns, contraction)
        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        traced = jax.jit(op).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
        return text, traced.out_info

    product, swiglu = pallas_kernels.dense_matmul, pallas_kernels.swiglu_matmul
    text, parts = lowered(product, 192, 4096, 12288)
    assert "wide_matmul" in text
    assert [part.shape for part in parts] == [(192, 4096)] * 4
    text, _ = lowered(product, 128, 4096, 12288)
    assert "wide_matmul" not in text
    text, out = lowered(swiglu, 192, 2 * 12288, 4096)
    assert "wide_swiglu" in text
    assert out.shape == (192, 12288)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 0}, "1 to 128 rows, tokens=0"),
        ({"tokens": 385}, "no tile that beats XLA is known for tokens=385, columns=4096"),
        ({"tokens": 136}, "no tile that beats XLA is known"),
        ({"tokens": 192, "columns": 4112}, "no tile that beats XLA is known"),
        ({"tokens": 192, "swiglu": True}, "no tile that beats XLA is known"),
        ({"tokens": 192, "dtype": jnp.float16}, "no tile .* in float16"),
        ({"tokens": 192, "dtype": jnp.float32}, "16-bit"),
        ({"dtype": jnp.float32}, "float32"),
        ({"columns": 4104}, "multiple of 16, columns=4104"),
        ({"contraction": 4128}, "multiple of 64, contraction=4128"),
    ],
)
def test_what_the_kernel_cannot_serve_goes_to_xla_with_the_reason(monkeypatch, changes, reason):
    devices.pretend(monkeypatch, devices.HOPPER)
    choice = api.choose(**SHAPE | changes)
    assert choice.implementation == "xla"
    assert re.search(reason, str(choice))
    with pytest.raises(ValueError, match="dense_matmul: mosaic_gpu cannot run here"):
        api.choose("mosaic_gpu", **SHAPE | changes)


@pytest.mark.parametrize("op", [pallas_kernels.dense_matmul, pallas_kernels.swiglu_matmul])
def test_shapes_that_do_not_fit_are_refused_with_the_shapes(op):
    x, w = arrays(2, 6, 8)
    for wrong in (w.T, w[0], w.astype(jnp.bfloat16)):
        with pytest.raises(ValueError, match=rf"{op.__name__}: .*float32\(2, 8\), w {wrong.dtype}"):
            op(x, wrong)


def test_swiglu_refuses_an_odd_number_of_rows():
    x, w = arrays(2, 7, 8)
    with pytest.raises(ValueError, match=r"swiglu_matmul: .*\(7, 8\)"):
        pallas_kernels.swiglu_matmul(x, w)
