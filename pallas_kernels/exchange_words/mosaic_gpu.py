"""Every rank's words to all ranks: a CTA sends 512 words through its slot of the mailbox."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxtyping import Array, Int32

from pallas_kernels.hopper import compat, lane_code, peer_code
from pallas_kernels.hopper.lane_code import Int
from pallas_kernels.peers import CHUNK_WORDS, Mailbox, Peers

_THREADS = 128
_PER_THREAD = CHUNK_WORDS // _THREADS


def why_not(*, words: int, peers: Peers) -> str | None:
    """Returns why this kernel cannot exchange so many words, or None."""
    most = peers.chunks * CHUNK_WORDS
    if words > most:
        return f"the peers' mailboxes are for {most} words, these are {words}"
    return None


def exchange_words(words: Int32[Array, " W"], peers: Peers) -> Int32[Array, "ranks W"]:
    """Returns the words of all ranks; see `pallas_kernels.exchange_words`."""
    (count,) = words.shape
    chunks = -(-count // CHUNK_WORDS)
    padded = jnp.pad(words, (0, chunks * CHUNK_WORDS - count))
    size = peers.num_ranks * padded.size

    def exchange_words(rank_gmem, addresses_gmem, words_gmem, out_gmem):
        @compat.inline_mgpu(
            arg_types=(*[plgpu.RefType()] * 4, plgpu.Layout.WG_SPLAT(())),
        )
        def exchange(_, rank_ref, addresses_ref, words_ref, out_ref, chunk_splat):
            rank = lane_code.load(rank_ref, lane_code.constant(0))
            exchange_chunk(
                rank, addresses_ref, lane_code.scalar(chunk_splat), words_ref, out_ref,
                mailbox=peers.word_mailbox, chunks=chunks,
            )  # fmt: skip

        exchange(rank_gmem, addresses_gmem, words_gmem, out_gmem, lax.axis_index("chunk"))

    (found,) = compat.kernel(
        exchange_words,
        out_type=(jax.ShapeDtypeStruct((size,), jnp.int32),),
        grid=(chunks,),
        grid_names=("chunk",),
    )(peers.rank, peers.addresses.reshape(-1), padded)
    return found.reshape(peers.num_ranks, padded.size)[:, :count]


def exchange_chunk(
    rank: Int,
    addresses: ir.Value,
    chunk: Int,
    words: ir.Value,
    out: ir.Value,
    *,
    mailbox: Mailbox,
    chunks: int,
) -> None:
    """Exchanges a thread's words of a chunk; `words` is flat, and `out` has it for every rank."""
    mine = [
        chunk * CHUNK_WORDS + lane_code.thread() * _PER_THREAD + place
        for place in range(_PER_THREAD)
    ]
    exchange = peer_code.Exchange(
        mailbox=mailbox,
        addresses=[peer_code.address_of(addresses, number) for number in range(mailbox.ranks)],
        rank=rank,
        slot=chunk,
        threads=_THREADS,
    )
    found = exchange.all_to_all([[lane_code.load(words, index) for index in mine]])
    for number, (piece,) in enumerate(found):
        for index, word in zip(mine, piece, strict=True):
            lane_code.store(out, index + number * chunks * CHUNK_WORDS, word)
