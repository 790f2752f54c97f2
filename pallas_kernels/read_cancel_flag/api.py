"""A flag in host memory that the device reads while a compiled loop runs.

A loop that runs as one CUDA graph computes with the arrays it was launched with; nobody can change
them while it runs. The kernel reads an address of host memory instead, so the host can cancel a
running loop.
"""

import functools

import jax
from jaxtyping import Array, Int32, Shaped

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.read_cancel_flag import mosaic_gpu


def choose(implementation: str = "auto") -> dispatch.Choice:
    """Returns which implementation reads the flag; "xla" does not read it."""
    return dispatch.choose("read_cancel_flag", implementation)


def read_cancel_flag(
    address: Int32[Array, "2"],  # the low and the high half
    given: Int32[Array, ""],
    after: Shaped[Array, "..."],
    *,
    implementation: str = "auto",
) -> Int32[Array, ""]:
    """Returns the int32 at a 4-byte aligned address of pinned host memory.

    Without the kernel it returns `given`. The read happens after `after` has been computed; the
    values of `after` do not matter. The caller keeps the memory alive until the program has ended.
    """
    return _read_cancel_flag(
        address, given, after, implementation=choose(implementation).implementation
    )


@functools.partial(jax.jit, static_argnames=("implementation",))
def _read_cancel_flag(address, given, after, *, implementation) -> jax.Array:
    if implementation == "xla":
        return given
    return lowered_once.call(mosaic_gpu.read_cancel_flag, address, after)
