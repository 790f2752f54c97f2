"""Attention inside padded rows against loops; who serves which shape; the call of cuDNN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import devices

import pallas_kernels
from pallas_kernels import device
from pallas_kernels.padded_attention import api

A100 = dataclasses.replace(devices.HOPPER, kind="NVIDIA A100", compute_capability=(8, 0))
T4 = dataclasses.replace(devices.HOPPER, kind="Tesla T4", compute_capability=(7, 5))


def attend_by_loops(q, k, v, lengths, *, is_causal=False):
    out = np.zeros(q.shape, np.float64)
    for b, t, n in np.ndindex(q.shape[:3]):
        end = min(lengths[b], t + 1) if is_causal else lengths[b]
        head = n * k.shape[2] // q.shape[2]
        keys, values = k[b, :end, head], v[b, :end, head]
        scores = keys.astype(np.float64) @ q[b, t, n] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("lengths", [[1, 5, 12], None], ids=["lengths", "whole"])
def test_queries_see_the_first_keys_of_their_row(lengths):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 3, 12, 2, 16)).astype(np.float32)
    expected = attend_by_loops(q, k, v, lengths or [12] * 3)
    for b, length in enumerate(lengths or []):  # what is past a row's length must not matter
        k[b, length:], v[b, length:] = 1e4, -1e4
    given = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    out = pallas_kernels.padded_attention(*map(jnp.asarray, (q, k, v)), given, implementation="xla")
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_share_keys_and_causal_queries_see_no_later_ones(is_causal):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 9, 6, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 9, 2, 8)).astype(np.float32)
    expected = attend_by_loops(q, k, v, [9, 4], is_causal=is_causal)
    out = pallas_kernels.padded_attention(
        *map(jnp.asarray, (q, k, v)), jnp.asarray([9, 4]), is_causal=is_causal, implementation="xla"
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("found", "dtype", "head_dim", "chosen", "reason"),
    [
        (devices.HOPPER, jnp.bfloat16, 128, "cudnn", ""),
        (A100, jnp.float16, 24, "cudnn", ""),
        (devices.HOPPER, jnp.float32, 128, "xla", "16-bit"),
        (devices.HOPPER, jnp.bfloat16, 256, "xla", "at most 128"),
        (devices.HOPPER, jnp.bfloat16, 20, "xla", "multiple of 8"),
        (T4, jnp.bfloat16, 128, "xla", "8.0 or later"),
        (devices.CPU, jnp.bfloat16, 128, "xla", "this is cpu"),
    ],
)
def test_cudnn_serves_what_it_can(monkeypatch, found, dtype, head_dim, chosen, reason):
    devices.pretend(monkeypatch, found)
    choice = api.choose(dtype=jnp.dtype(dtype), head_dim=head_dim)
    assert choice.implementation == chosen
    assert reason in choice.reasons


def test_what_is_forced_and_cannot_run_is_an_error():
    q = jnp.zeros((1, 8, 2, 16))
    with pytest.raises(ValueError, match="padded_attention: cudnn cannot run here"):
        pallas_kernels.padded_attention(q, q, q, implementation="cudnn")


@pytest.mark.parametrize("k_heads, v_heads", [(1, 2), (3, 3)])
def test_shapes_must_agree(k_heads, v_heads):
    q, k, v = (jnp.zeros((1, 8, heads, 16)) for heads in (2, k_heads, v_heads))
    with pytest.raises(ValueError, match=rf"k.shape=\(1, 8, {k_heads}, 16\)"):
        pallas_kernels.padded_attention(q, k, v)


def test_cudnn_gets_lengths_and_no_mask(monkeypatch):
    """A mask would cost it a third of its speed."""
    calls = []

    def attention(*arrays, **options):
        calls.append(options)
        return arrays[0]

    devices.pretend(monkeypatch, devices.HOPPER)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)  # no cuDNN where we trace
    q = jax.ShapeDtypeStruct((2, 64, 3, 136), jnp.bfloat16)
    narrow = jax.ShapeDtypeStruct((2, 64, 3, 120), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    for x in (q, narrow):
        jax.eval_shape(lambda x, n: pallas_kernels.padded_attention(x, x, x, n), x, lengths)
    assert [call["implementation"] for call in calls] == ["xla", "cudnn"]
    for call in calls:
        assert call["key_value_seq_lengths"].shape == (2,)
        assert set(call) == {"implementation", "is_causal", "key_value_seq_lengths"}


@pytest.mark.gpu
@pytest.mark.skipif(device.local_device().cudnn_refusal is not None, reason="needs cuDNN")
@pytest.mark.parametrize("lengths", [[64, 1120, 1088], None], ids=["lengths", "whole"])
def test_cudnn_equals_the_reference(lengths):
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.normal(size=(3, 1120, 4, 128)), jnp.bfloat16) for _ in range(3))
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    run = pallas_kernels.padded_attention
    out = run(q, k, v, lengths, implementation="cudnn")
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    expected = run(*wide, lengths, implementation="xla")
    error = np.linalg.norm(out.astype(jnp.float32) - expected) / np.linalg.norm(expected)
    assert error < 5e-3  # bfloat16 keeps 8 bits
    assert jnp.isfinite(out).all()
