"""Sums over ranks in peers' memory: the threads' code of several GPUs, interpreted together.

The ranks begin at random times and in random order, some of them a launch ahead of the others.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.all_reduce import mosaic_gpu
from pallas_kernels.hopper import compat
from pallas_kernels.peers import buffer_words

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support import devices
from support import ranks as ranks_lib
from support.lane_interpreter import run_threads

from pallas_kernels.hopper import lane_code

THREADS = 128


def interpreted_sum(parts, *, two_shot, seed, peers=None, buffers=None, resident=None):
    """Returns what every rank computes of bf16 `parts` [launches, ranks, T, D], the same shape."""
    launches, ranks, T, D = parts.shape
    peers = peers or ranks_lib.peers(ranks, rows=T, width=D)
    words = parts.reshape(-1).view(np.uint32).copy()
    out = np.zeros_like(words)
    per_thread = D // 2 // THREADS  # words
    size = 4 if per_thread % 4 == 0 else 2

    def emit(refs, _, scalars):
        words_ref, addresses, out_ref = refs
        launch, rank, row = map(lane_code.scalar, scalars)
        first = ((launch * ranks + rank) * T + row) * (D // 2)
        places = [
            [first + lane_code.thread() * size + (piece * THREADS * size + word)
             for word in range(size)]
            for piece in range(per_thread // size)
        ]  # fmt: skip
        pieces = [[lane_code.load(words_ref, place) for place in piece] for piece in places]
        total = mosaic_gpu.exchange_row(
            rank, addresses, row, pieces, mailbox=peers.row_mailbox, two_shot=two_shot
        )
        for piece, numbers in zip(places, total, strict=True):
            for place, number in zip(piece, numbers, strict=True):
                lane_code.store(out_ref, place, number)

    scalars = list(np.ndindex(launches, ranks, T))
    run_threads(
        emit,
        [words, ranks_lib.addresses(peers), out],
        scalars=scalars,
        warps=THREADS // 32,
        seed=seed,
        addressed=ranks_lib.buffers(peers) if buffers is None else buffers,
        launches=[(rank, launch) for launch, rank, _ in scalars],
        resident=resident,
    )
    return out.view(parts.dtype).reshape(parts.shape)


def drawn(*shape, seed):
    rng = np.random.default_rng(seed)
    scale = 2.0 ** rng.integers(-6, 7, shape)  # so that the order of additions shows
    return (rng.normal(size=shape) * scale).astype(ml_dtypes.bfloat16)


def sum_in_rank_order(parts):
    """In float32, rounded once."""
    total = functools.reduce(np.add, np.moveaxis(parts, 1, 0).astype(np.float32))
    return np.broadcast_to(total.astype(parts.dtype)[:, None], parts.shape)


def assert_same_bits(found, expected):
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ranks", "two_shot"), [(2, False), (4, False), (4, True), (2, True), (8, True)]
)
def test_ranks_sum_in_rank_order_however_far_apart_they_run(ranks, two_shot, seed):
    parts = drawn(3, ranks, 3, 512, seed=seed)
    found = interpreted_sum(parts, two_shot=two_shot, seed=seed, resident=2)
    assert_same_bits(found, sum_in_rank_order(parts))


def test_wide_pieces_are_exchanged_too():
    parts = drawn(1, 2, 1, 2048, seed=5)
    assert_same_bits(interpreted_sum(parts, two_shot=False, seed=5), sum_in_rank_order(parts))


def test_forms_may_follow_one_another_on_the_same_slots():
    """A mailbox has what earlier launches left; their rows were fewer, or more."""
    peers = ranks_lib.peers(4, rows=4, width=512)
    buffers = ranks_lib.buffers(peers)
    for number, (T, two_shot) in enumerate([(2, False), (4, True), (1, False), (4, False)]):
        parts = drawn(2, 4, T, 512, seed=number)
        found = interpreted_sum(parts, two_shot=two_shot, seed=number, peers=peers, buffers=buffers)
        assert_same_bits(found, sum_in_rank_order(parts))


@pytest.mark.parametrize("last", [2**31 - 2, 2**32 - 2])
def test_epochs_wrap_around(last):
    peers = ranks_lib.peers(2, rows=2, width=512)
    buffers = ranks_lib.buffers(peers)
    mailbox = peers.row_mailbox
    for memory in buffers.values():
        memory[mailbox.flags // 4 : mailbox.end // 4] = last
    parts = drawn(4, 2, 2, 512, seed=3)
    found = interpreted_sum(parts, two_shot=False, seed=3, peers=peers, buffers=buffers)
    assert_same_bits(found, sum_in_rank_order(parts))


def test_nan_stays_in_its_column():
    parts = drawn(1, 2, 1, 512, seed=1)
    parts[0, 1, 0, 7] = np.nan
    found = interpreted_sum(parts, two_shot=False, seed=1).astype(np.float32)
    assert np.isnan(found[0, :, 0, 7]).all()
    assert not np.isnan(np.delete(found, 7, axis=-1)).any()


def test_a_rank_that_never_comes_is_waited_for():
    """On a GPU the wait ends in an error after `peer_code.WAIT_S`; here nothing else ends it."""
    peers = ranks_lib.peers(2, rows=1, width=512)
    with pytest.raises(AssertionError, match="wait for ever"):
        _lone_rank(peers)


def _lone_rank(peers):
    def emit(refs, _, scalars):
        (addresses,) = refs
        rank, row = map(lane_code.scalar, scalars)
        pieces = [[lane_code.thread(), lane_code.thread()]]
        mosaic_gpu.exchange_row(
            rank, addresses, row, pieces, mailbox=peers.row_mailbox, two_shot=False
        )

    run_threads(
        emit,
        [ranks_lib.addresses(peers)],
        scalars=[(0, 0)],
        warps=4,
        addressed=ranks_lib.buffers(peers),
    )


def lowered(function, *arguments):
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def bfloat16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("T", [32, 2048])
@pytest.mark.parametrize("D", [2048, 3584, 4096])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_serving_shapes_lower_for_cuda(T, D, ranks):
    peers = ranks_lib.peers(ranks, rows=4096, width=D)

    def run(x, added, weight, peers):
        return mosaic_gpu.all_reduce_add_rms_norm(x, (added, x), weight, peers, eps=1e-6)

    x = bfloat16(T, D)
    assert mosaic_gpu.why_not(dtype=jnp.bfloat16, tokens=T, width=D, peers=peers) is None
    assert "mosaic_gpu" in lowered(run, x, x, bfloat16(D), peers)
    assert "mosaic_gpu" in lowered(lambda x, peers: mosaic_gpu.all_reduce((x,), peers), x, peers)


def test_what_the_kernel_cannot_serve_has_a_reason():
    peers = ranks_lib.peers(2, rows=64, width=1024)
    why_not = functools.partial(mosaic_gpu.why_not, peers=peers)
    assert "bfloat16" in why_not(dtype=jnp.float16, tokens=1, width=1024)
    assert "multiple of 512" in why_not(dtype=jnp.bfloat16, tokens=1, width=640)
    assert "rows of 2048 bytes" in why_not(dtype=jnp.bfloat16, tokens=1, width=1536)
    assert "64 rows, these are 65" in why_not(dtype=jnp.bfloat16, tokens=65, width=1024)
    with pytest.raises(ValueError, match="a buffer of"):
        buffer_words(ranks=8, rows=65536, row_bytes=16384, chunks=1)


@pytest.mark.parametrize(
    ("T", "D", "rows", "kernels"),
    [
        (10, 512, 4, 2),  # parts of 4 rows, and of 2, for more rows than the buffers hold
        (256, 2816, 4096, 1),  # a canvas of DiffusionGemma, as rows of 2048
        (64, 2816, 4096, 1),
    ],
)
def test_sums_that_are_no_whole_message_are_cut_otherwise(T, D, rows, kernels, monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)

    def run(x, peers):
        return pallas_kernels.all_reduce((x,), axis_name="tp", peers=peers)

    x, peers = bfloat16(T, D), ranks_lib.peers(2, rows=rows, width=D)
    lowered = jax.jit(run).trace(x, peers).lower(lowering_platforms=("cuda",))
    assert lowered.out_info.shape == (T, D)
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == kernels
    assert "stablehlo.all_reduce" not in text
