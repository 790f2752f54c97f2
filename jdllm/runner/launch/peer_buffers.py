"""Buffers through which the GPUs of a mesh exchange data inside compiled loops.

Kernels write into them by address, so XLA does not know that they are in use: whoever allocates
them keeps them until the last program that got their addresses has ended.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int32

import pallas_kernels
from jdllm.device import sharding

logger = logging.getLogger(__name__)

MOST_ROWS = 4096  # tokens of a step whose sums go through the buffers; more do not run in loops
STATISTICS_WORDS = 11 * MOST_ROWS  # of the unembedding, for the tokens of such a step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerBuffers:
    """A buffer on each device of a mesh, and what programs get of them."""

    buffers: Int32[Array, "tp words"]
    peers: pallas_kernels.Peers

    @property
    def bytes_per_device(self) -> int:
        return self.buffers.nbytes // self.buffers.shape[0]


def allocate(mesh: Mesh, *, row_bytes: int, words: int = 0) -> PeerBuffers:
    """Returns buffers for rows of up to `row_bytes` and for messages of `words`.

    Statistics always fit. Raises ValueError if the buffers would be too large.

    The devices must reach one another's memory (`why_not`).
    """
    tp = mesh.devices.size
    chunks = -(-max(words, STATISTICS_WORDS) // pallas_kernels.CHUNK_WORDS)
    sizes = {"rows": MOST_ROWS, "row_bytes": row_bytes, "chunks": chunks}
    size = pallas_kernels.buffer_words(ranks=tp, **sizes)
    split = NamedSharding(mesh, sharding.SPLIT)
    zeros = jax.jit(lambda: jnp.zeros((tp, size), jnp.int32), out_shardings=split)
    buffers = jax.block_until_ready(zeros())
    addresses = np.zeros((tp, 1), np.uint64)
    for shard in buffers.addressable_shards:
        addresses[shard.index[0].start or 0] = shard.data.unsafe_buffer_pointer()
    peers = pallas_kernels.Peers(
        rank=jax.device_put(np.arange(tp, dtype=np.int32)[:, None], split),
        addresses=jax.device_put(
            addresses.view(np.int32), NamedSharding(mesh, sharding.REPLICATED)
        ),
        axis_name=sharding.AXIS,
        **sizes,
    )
    return PeerBuffers(buffers=buffers, peers=peers)


def connect(mesh: Mesh, *, row_bytes: int, words: int, is_disabled: bool) -> PeerBuffers | None:
    """Returns buffers; None, with a line of the log, where sums are left to XLA's collectives."""
    reason = "--disable-custom-all-reduce" if is_disabled else why_not(mesh)
    if reason is not None:
        logger.info("sums over ranks are XLA's, loops are no CUDA graphs: %s", reason)
        return None
    return allocate(mesh, row_bytes=row_bytes, words=words)


def why_not(mesh: Mesh) -> str | None:
    """Returns why the devices of a mesh cannot write into one another's memory, None if they can.

    XLA lets all GPUs of a process reach each other where the hardware allows it.
    """
    devices = list(mesh.devices.flat)
    if devices[0].platform != "gpu":
        return f"the devices are no GPUs ({devices[0].platform})"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"CUDA's driver cannot be asked whether GPUs reach each other: {error}"
    for one, other in itertools.permutations(devices, 2):
        if not _reaches(cuda, one.local_hardware_id, other.local_hardware_id):
            return f"GPU {one.id} cannot access the memory of GPU {other.id}"
    return None


def _reaches(cuda: ctypes.CDLL, one: int, other: int) -> bool:
    found, handles = ctypes.c_int(0), (ctypes.c_int(0), ctypes.c_int(0))
    for handle, number in zip(handles, (one, other), strict=True):
        if cuda.cuDeviceGet(ctypes.byref(handle), number):
            return False
    status = cuda.cuDeviceCanAccessPeer(ctypes.byref(found), *handles)
    return status == 0 and bool(found.value)
