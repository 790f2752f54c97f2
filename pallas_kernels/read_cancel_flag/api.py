"""A flag of the host's memory, read on the device while a compiled loop runs.

A loop that is one CUDA graph computes with what it was launched with: no array changes under it.
The kernel reads an address instead, so the host can cancel a running loop.
"""

import functools

import jax

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.read_cancel_flag import mosaic_gpu as gpu_kernel


def choose(implementation: str = "auto") -> dispatch.Choice:
    """Returns which implementation reads the flag; "xla" does not."""
    return dispatch.choose("read_cancel_flag", implementation)


def read_cancel_flag(
    address: jax.Array,  # int32 [2]: the low and the high half
    given: jax.Array,  # int32 scalar
    after: jax.Array,  # any shape
    *,
    implementation: str = "auto",
) -> jax.Array:
    """Returns the int32 at a 4-byte aligned address of pinned host memory; `given` without kernel.

    It is read once `after` has been computed, whose values do not matter. Whoever passes the
    address keeps its memory until the program has ended.
    """
    return _read_cancel_flag(
        address, given, after, implementation=choose(implementation).implementation
    )


@functools.partial(jax.jit, static_argnames=("implementation",))
def _read_cancel_flag(address, given, after, *, implementation) -> jax.Array:
    if implementation == "xla":
        return given
    return lowered_once.call(gpu_kernel.read_cancel_flag, address, after)
