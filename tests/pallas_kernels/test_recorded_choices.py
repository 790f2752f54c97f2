"""A record holds every choice of a program's ops, whatever jax had cached before."""

import concurrent.futures
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import devices

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.extend_attention import cudnn

A100 = dataclasses.replace(devices.HOPPER, kind="NVIDIA A100", compute_capability=(8, 0))
KERNEL = dispatch.Choice(implementation="mosaic_gpu", refusals={})


def reference(reason: str) -> dispatch.Choice:
    return dispatch.Choice(implementation="xla", refusals={"mosaic_gpu": reason})


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(function, *arguments) -> dispatch.Choices:
    with pallas_kernels.record_choices() as choices:
        jax.jit(lambda *args: function(*args)).trace(*arguments)  # a separate program
    return choices


def alone(function, x):
    """Runs a function of ranks on one."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("tp",))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


INT = jnp.int32
T, H, ROWS = 16, 64, 2
CALLS = {
    "add_rms_norm": lambda x, w: pallas_kernels.add_rms_norm(x, (x,), w[0], eps=1e-6),
    "all_reduce": lambda x, w: alone(
        lambda x: pallas_kernels.all_reduce((x,), axis_name="tp"), x
    ),
    "dense_matmul": pallas_kernels.dense_matmul,
    "exchange_words": lambda x, w: alone(
        lambda x: pallas_kernels.exchange_words(x.astype(INT), axis_name="tp"), x
    ),
    "extend_attention": lambda x, w: pallas_kernels.extend_attention(
        x.reshape(T, 4, H), jnp.zeros((2, 2, 2, 32, H), x.dtype), jnp.arange(ROWS + 1) * 8,
        jnp.zeros(ROWS, INT), jnp.full(ROWS, 8), jnp.zeros((ROWS, 1), INT),
        visibility="full", block_size=8, scale=1.0,
    ),
    "fp8_matmul": lambda x, w: pallas_kernels.fp8_matmul(x, *pallas_kernels.quantize_rows(w)),
    "grouped_matmul": lambda x, w: pallas_kernels.grouped_matmul(
        x, jnp.zeros((4, 16, 256), x.dtype), jnp.zeros((4, 256, 8), x.dtype),
        jnp.zeros((T, 2), INT), jnp.ones((T, 2), jnp.float32),
    ),
    "padded_attention": lambda x, w: pallas_kernels.padded_attention(
        *[x.reshape(2, T // 2, 4, H)] * 3, jnp.full(2, T // 2)
    ),
    "read_cancel_flag": lambda x, w: pallas_kernels.read_cancel_flag(
        jnp.zeros(2, INT), jnp.int32(0), x
    ),
    "rotate_and_cache": lambda x, w: pallas_kernels.rotate_and_cache(
        (x,), None, None, jnp.ones((T, H // 2)), jnp.ones((T, H // 2)),
        jnp.zeros((1, 2, 1, 32, H), x.dtype), jnp.arange(T), num_query_heads=2, num_kv_heads=1,
    ),
    "top_k_routing": lambda x, w: pallas_kernels.top_k_routing(
        jnp.zeros((T, 8)), jnp.zeros(8), experts_per_token=2
    ),
    "unembed_stats": pallas_kernels.unembed_stats,
}  # fmt: skip


@pytest.mark.parametrize("op", dispatch.IMPLEMENTATIONS)
def test_every_op_is_recorded_in_every_program(monkeypatch, op):
    """Also in the second program, where the op's own jit is already in jax's cache."""
    devices.pretend(monkeypatch, devices.CPU)
    width = {"rotate_and_cache": 4 * H}.get(op, 256)
    arguments = array(T, width), array(32, width)
    first, second = (traced(CALLS[op], *arguments) for _ in range(2))
    assert list(first) == [op]
    (choice,) = first[op]
    assert choice.implementation == "xla"
    best = dispatch.IMPLEMENTATIONS[op][0]
    assert "needs an NVIDIA GPU, this is cpu" in choice.refusals[best]
    assert first == second


def test_swiglu_counts_as_a_dense_matmul(monkeypatch):
    devices.pretend(monkeypatch, devices.CPU)
    found = traced(pallas_kernels.swiglu_matmul, array(T, 64), array(32, 64))
    assert list(found) == ["dense_matmul"]


def test_each_choice_is_kept_once(monkeypatch):
    devices.pretend(monkeypatch, devices.CPU)

    def program(x, w, narrow):
        for weights in (w, narrow, w):
            pallas_kernels.dense_matmul(x, weights)
        return pallas_kernels.dense_matmul(x, w, implementation="xla")

    found = traced(program, array(T, 64), array(32, 64), array(16, 64))
    assert [bool(choice.refusals) for choice in found["dense_matmul"]] == [True, False]


def test_ops_are_recorded_inside_loops_and_branches(monkeypatch):
    devices.pretend(monkeypatch, devices.CPU)

    def program(x, w):
        def body(_, x):
            (x,) = pallas_kernels.dense_matmul(x, w)
            return x

        x = jax.lax.fori_loop(0, 3, body, x)
        return jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: CALLS["add_rms_norm"](x, w)[0])

    found = traced(program, array(T, 64), array(64, 64))
    assert sorted(found) == ["add_rms_norm", "dense_matmul"]


def test_another_device_is_another_choice_at_known_shapes(monkeypatch):
    """On an A100 cuDNN serves one block a row, XLA prefill; earlier choices do not matter."""
    arguments = [
        array(64, 4, H), array(2, 2, 2, 32, H), array(3, dtype=INT), array(2, dtype=INT),
        array(2, dtype=INT), array(2, 4, dtype=INT),
    ]  # fmt: skip

    def attend(block):
        def program(*arrays):
            return pallas_kernels.extend_attention(
                *arrays, visibility="block_causal", block_size=block, scale=1.0
            )

        (choice,) = traced(program, *arguments)["extend_attention"]
        return choice.implementation

    devices.pretend(monkeypatch, devices.CPU)
    assert [attend(32), attend(8)] == ["xla", "xla"]
    devices.pretend(monkeypatch, A100)
    monkeypatch.setattr(cudnn, "attend_blocks", lambda q, *_, **__: q)  # no cuDNN where we trace
    assert [attend(32), attend(8)] == ["cudnn", "xla"]


def test_threads_and_blocks_keep_their_own_records(monkeypatch):
    devices.pretend(monkeypatch, devices.CPU)
    ops, barrier = list(dispatch.IMPLEMENTATIONS), threading.Barrier(len(dispatch.IMPLEMENTATIONS))

    def record(op):
        with pallas_kernels.record_choices() as choices:
            barrier.wait(60)
            dispatch.choose(op)
            barrier.wait(60)
        return list(choices)

    with pallas_kernels.record_choices() as outside:
        with concurrent.futures.ThreadPoolExecutor(len(ops)) as pool:
            assert list(pool.map(record, ops)) == [[op] for op in ops]
        with pallas_kernels.record_choices() as inner:
            dispatch.choose("add_rms_norm")
        dispatch.choose("dense_matmul")
    dispatch.choose("unembed_stats")
    assert list(inner) == ["add_rms_norm"]
    assert list(outside) == ["add_rms_norm", "dense_matmul"]


def test_a_refused_choice_is_no_choice(monkeypatch):
    devices.pretend(monkeypatch, devices.CPU)
    with pallas_kernels.record_choices() as choices, pytest.raises(ValueError, match="cannot run"):
        dispatch.choose("add_rms_norm", "mosaic_gpu")
    assert choices == {}


def test_what_all_launches_run_is_said_once():
    launches = [{"b": [KERNEL], "a": [reference("odd")]}, {"a": [reference("odd")]}, {}]
    found = pallas_kernels.describe_choices(launches)
    assert list(found.items()) == [("a", "xla (mosaic_gpu: odd)"), ("b", "mosaic_gpu")]


def test_launches_that_run_something_else_are_counted():
    launches = [
        {"op": [KERNEL]},
        {"op": [reference("wide"), KERNEL, reference("wider")]},
        {"other": [KERNEL]},
        {"op": [KERNEL]},
    ]
    assert pallas_kernels.describe_choices(launches)["op"] == (
        "mosaic_gpu in 3 of 3 launches, xla in 1 of 3 launches (mosaic_gpu: wide; and 1 more)"
    )
