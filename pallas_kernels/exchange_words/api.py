"""What every rank of a mesh has, on all of them: few numbers, every step of a loop.

XLA's `all_gather` keeps a loop out of a CUDA graph; the kernel in `mosaic_gpu.py` does not.
"""

import jax
from jaxtyping import Array, Int32

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.exchange_words import mosaic_gpu
from pallas_kernels.peers import NO_BUFFERS, Peers


def choose(implementation: str = "auto", *, words: int, peers: Peers | None) -> dispatch.Choice:
    """Returns which implementation of `exchange_words` serves so many words."""
    reason = NO_BUFFERS
    if peers is not None:
        reason = mosaic_gpu.why_not(words=words, peers=peers)
    return dispatch.choose("exchange_words", implementation, refusals={"mosaic_gpu": reason})


def exchange_words(
    words: Int32[Array, "..."],
    *,
    axis_name: str,
    peers: Peers | None = None,
    implementation: str = "auto",
) -> Int32[Array, "ranks ..."]:
    """Returns the words of all ranks of a `shard_map`, in rank order, the same on each."""
    chosen = choose(implementation, words=words.size, peers=peers)
    if chosen.implementation == "mosaic_gpu":
        found = _exchange_words(words.reshape(-1), peers)
        return found.reshape(-1, *words.shape)
    return jax.lax.all_gather(words, axis_name)


@jax.jit
def _exchange_words(words, peers) -> jax.Array:
    return lowered_once.call(mosaic_gpu.exchange_words, words, peers)
