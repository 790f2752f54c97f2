"""Words of all ranks through peers' memory, interpreted together; the kernel lowers for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.exchange_words import mosaic_gpu
from pallas_kernels.hopper import compat
from pallas_kernels.peers import CHUNK_WORDS

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support import ranks as ranks_lib
from support.lane_interpreter import run_threads

from pallas_kernels.hopper import lane_code

CHUNK = CHUNK_WORDS


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_rank_gets_the_words_of_all(ranks, seed):
    launches, chunks = 3, 2
    peers = ranks_lib.peers(ranks, rows=4, width=512, chunks=chunks)
    drawn = np.random.default_rng(seed).integers(0, 2**32, (launches, ranks, chunks * CHUNK))
    words = drawn.astype(np.uint32)
    out = np.zeros((launches, ranks, ranks * chunks * CHUNK), np.uint32)

    def emit(refs, _, scalars):
        addresses, words_ref, out_ref = refs
        rank, chunk = map(lane_code.scalar, scalars)
        mosaic_gpu.exchange_chunk(
            rank, addresses, chunk, words_ref, out_ref, mailbox=peers.word_mailbox, chunks=chunks
        )

    ctas = list(np.ndindex(launches, ranks, chunks))
    run_threads(
        emit,
        [
            [ranks_lib.addresses(peers), words[launch, rank], out[launch, rank]]
            for launch, rank, _ in ctas
        ],
        scalars=[(rank, chunk) for _, rank, chunk in ctas],
        warps=4,
        seed=seed,
        addressed=ranks_lib.buffers(peers),
        launches=[(rank, launch) for launch, rank, _ in ctas],
        resident=1,
    )
    expected = np.broadcast_to(words.reshape(launches, 1, -1), out.shape)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("count", [1, 32 * 11, 2048 * 11])
@pytest.mark.parametrize("ranks", [2, 8])
def test_serving_shapes_lower_for_cuda(ranks, count):
    peers = ranks_lib.peers(ranks, rows=4, width=512, chunks=64)
    assert mosaic_gpu.why_not(words=count, peers=peers) is None
    traced = jax.jit(mosaic_gpu.exchange_words).trace(
        jax.ShapeDtypeStruct((count,), jnp.int32), peers
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_more_words_than_the_mailbox_has_are_refused_with_a_reason():
    peers = ranks_lib.peers(2, rows=4, width=512, chunks=2)
    assert "for 1024 words, these are 1025" in mosaic_gpu.why_not(words=1025, peers=peers)
