"""Sums of rows over ranks, with the residual add and RMSNorm after them, as one kernel.

A CTA takes a row, as in `add_rms_norm`. It sums what its rank has, exchanges the row with the same
CTA of the other ranks through their memory (`hopper/peer_code.py`), and sums the rows of all ranks
in rank order in float32, rounded once. So every rank has the same bits, and no library is called:
the kernel can be captured into the CUDA graph of a loop, which NCCL cannot.

A row is written to each of the other ranks, (ranks - 1) * T * D * 2 bytes a GPU. In two shots it is
written once, to the rank that owns the row, which sends the sum to the others. That takes one more
round over the link, so few rows go in one shot.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import mosaic_gpu
from pallas_kernels.hopper import compat, lane_code, peer_code
from pallas_kernels.hopper.lane_code import Int
from pallas_kernels.peers import Mailbox, Peers

# From so many rows on a message goes in two shots; with two ranks that would send as much.
_TWO_SHOT_ROWS = {4: 512, 8: 128}


def why_not(*, dtype: jnp.dtype, tokens: int, width: int, peers: Peers) -> str | None:
    """Returns why this kernel cannot serve the shape, or None."""
    if jnp.dtype(dtype).name != "bfloat16":
        return f"sums of bfloat16 only, this is {jnp.dtype(dtype).name}"
    if reason := mosaic_gpu.why_not_width(width):
        return reason
    if 2 * width > peers.row_bytes:
        return f"the peers' mailboxes are for rows of {peers.row_bytes} bytes, {width=}"
    if tokens > peers.rows:
        return f"the peers' mailboxes are for {peers.rows} rows, these are {tokens}"
    return None


def width_of_rows(tokens: int, width: int, peers: Peers) -> int:
    """Returns the width of the rows into which to cut a sum without a norm.

    It has no rows of its own: if those of the activations do not suit, there may be others.
    """
    step, most = mosaic_gpu.WIDTH_STEP, min(mosaic_gpu.MAX_WIDTH, peers.row_bytes // 2)
    if mosaic_gpu.why_not_width(width) is None:
        return width
    fitting = [one for one in range(step, most + 1, step) if tokens * width % one == 0]
    return max(fitting, default=width)


def is_two_shot(*, tokens: int, num_ranks: int) -> bool:
    """Returns whether a message goes to the owner of its row first."""
    rows = _TWO_SHOT_ROWS.get(num_ranks)
    return rows is not None and tokens >= rows


def all_reduce(added: tuple[Float[Array, "T D"], ...], peers: Peers) -> Float[Array, "T D"]:
    """Returns sum(added) of all ranks; see `pallas_kernels.all_reduce`."""
    tokens, width = added[0].shape
    (total,) = compat.kernel(
        functools.partial(
            _sum_row,
            mailbox=peers.row_mailbox,
            two_shot=is_two_shot(tokens=tokens, num_ranks=peers.num_ranks),
        ),
        out_type=(jax.ShapeDtypeStruct((tokens, width), added[0].dtype),),
        grid=(tokens,),
        grid_names=("row",),
    )(peers.rank, peers.addresses.reshape(-1), *added)
    return total


def all_reduce_add_rms_norm(
    x: Float[Array, "T D"],
    added: tuple[Float[Array, "T D"], ...],
    weight: Float[Array, " D"],
    peers: Peers,
    *,
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns (x + sum(added) of all ranks, its RMSNorm)."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return compat.kernel(
        functools.partial(
            _norm_row,
            eps=eps,
            mailbox=peers.row_mailbox,
            two_shot=is_two_shot(tokens=x.shape[0], num_ranks=peers.num_ranks),
        ),
        out_type=(out, out),
        grid=(x.shape[0],),
        grid_names=("row",),
        # The reciprocal root decides bf16 roundings: keep it that of the reference.
        compiler_params={"approx_math": False},
    )(peers.rank, peers.addresses.reshape(-1), x, *added, weight)


def _sum_row(rank_gmem, addresses_gmem, *refs, mailbox, two_shot):
    *added_gmem, total_gmem = refs
    total_gmem[lax.axis_index("row")] = _total_of_row(
        rank_gmem, addresses_gmem, added_gmem, mailbox, two_shot
    )


def _norm_row(rank_gmem, addresses_gmem, x_gmem, *refs, eps, mailbox, two_shot):
    *added_gmem, weight_gmem, sum_gmem, normed_gmem = refs
    added = _total_of_row(rank_gmem, addresses_gmem, added_gmem, mailbox, two_shot)
    mosaic_gpu.store_sum_and_norm(
        x_gmem, added.astype(jnp.float32), weight_gmem, sum_gmem, normed_gmem,
        row=lax.axis_index("row"), eps=eps,
    )  # fmt: skip


def _total_of_row(rank_gmem, addresses_gmem, added_gmem, mailbox, two_shot):
    """Returns the sum of this CTA's row of `added` over all ranks, in bfloat16."""
    row, width = lax.axis_index("row"), added_gmem[0].shape[1]
    layout, mine = mosaic_gpu.layout_of(width), mosaic_gpu.sum_of_row(added_gmem, row)

    @compat.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), layout),
        return_type=plgpu.ShapeDtypeStruct((width,), jnp.bfloat16, layout=layout),
    )
    def exchange(_, rank_ref, addresses_ref, row_splat, fragment):
        pieces = [_words(register) for register in fragment.registers.flat]
        total = exchange_row(
            lane_code.load(rank_ref, lane_code.constant(0)),
            addresses_ref,
            lane_code.scalar(row_splat),
            pieces,
            mailbox=mailbox,
            two_shot=two_shot,
        )
        registers = np.empty(fragment.registers.shape, dtype=object)
        for place, words in enumerate(total):
            registers.flat[place] = _values(words)
        return fragmented_array.FragmentedArray(
            _registers=registers, _layout=fragment.layout, _is_signed=None
        )

    return exchange(rank_gmem, addresses_gmem, row, mine.astype(jnp.bfloat16))


def exchange_row(
    rank: Int,
    addresses: ir.Value,
    row: Int,
    pieces: list[list[Int]],
    *,
    mailbox: Mailbox,
    two_shot: bool,
) -> list[list[Int]]:
    """Returns a thread's words of the sum of a row over all ranks; each word is two bfloat16."""
    exchange = peer_code.Exchange(
        mailbox=mailbox,
        addresses=[peer_code.address_of(addresses, number) for number in range(mailbox.ranks)],
        rank=rank,
        slot=row,
        threads=mosaic_gpu.THREADS,
    )
    return exchange.reduce(pieces, _sum_of_ranks, two_shot=two_shot)


def _sum_of_ranks(parts: list[list[list[Int]]]) -> list[list[Int]]:
    """Adds in rank order in float32 and rounds once; `parts` is [rank][piece][word]."""

    def total(words: tuple[Int, ...]) -> Int:
        low = functools.reduce(lambda a, b: a + b, map(peer_code.low_float, words))
        high = functools.reduce(lambda a, b: a + b, map(peer_code.high_float, words))
        return peer_code.bfloat16_pair(low, high)

    return [
        [total(words) for words in zip(*pieces, strict=True)] for pieces in zip(*parts, strict=True)
    ]


def _words(register: ir.Value) -> list[Int]:
    """Returns a register's values, pairs of bfloat16, as words."""
    i32 = ir.IntegerType.get_signless(32)
    count = ir.VectorType(register.type).shape[0] // 2
    words = vector.bitcast(ir.VectorType.get((count,), i32), register)
    return [
        Int(vector.extract(words, dynamic_position=[], static_position=[place]))
        for place in range(count)
    ]


def _values(words: list[Int]) -> ir.Value:
    """Returns what `_words` took apart."""
    kind = ir.VectorType.get((len(words),), ir.IntegerType.get_signless(32))
    packed = llvm.mlir_undef(kind)
    for place, word in enumerate(words):
        packed = vector.insert(word.value, packed, dynamic_position=[], static_position=[place])
    values = ir.VectorType.get((2 * len(words),), ir.BF16Type.get())
    return vector.bitcast(values, packed)
