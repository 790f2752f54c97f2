"""How the host ends launches under way: a flag in its memory that they read after every step.

The flag is a count, and the host counts it up; a launch that was given another count ends. So one
call ends all launches in flight and none that follows, and nothing has to be taken back. Where no
kernel can read the flag (`pallas_kernels.read_cancel_flag`), launches run for as many steps as they
were given.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import Any

import jax
import numpy as np

import pallas_kernels
from jdllm import device

_WORDS = 64  # cache lines that nothing else is in; the first word is the flag


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """What a launch is given: where the flag is, and the count that lets it go on."""

    address: Any  # [2] int32: the low and the high half; zeros: never read
    count: Any  # int32 scalar

    def stop_requested(self, flag: jax.Array) -> jax.Array:
        """Returns whether the host has asked for an end since the launch was planned."""
        return flag != self.count

    def poll(self, after: jax.Array, *, implementation: str) -> jax.Array:
        """Returns the flag, int32 scalar, as it is once `after` has been computed."""
        return pallas_kernels.read_cancel_flag(
            self.address, self.count, after, implementation=implementation
        )


def shapes() -> Interrupt:
    """Returns an interrupt's shapes: without one there is no address that a kernel may read."""
    shape = jax.ShapeDtypeStruct
    return Interrupt(address=shape((2,), np.int32), count=shape((), np.int32))


class Interrupts:
    """Owns the flag; `request_stop` may be called by any thread."""

    def __init__(self, *, implementation: str = "auto"):
        chosen = pallas_kernels.choose_read_cancel_flag(implementation)
        self._words, self._address = np.zeros((_WORDS,), np.int32), 0
        if chosen.implementation != "xla":
            pinned = jax.sharding.SingleDeviceSharding(device.used(), memory_kind="pinned_host")
            self._memory = jax.block_until_ready(jax.device_put(self._words, pinned))
            self._address = self._memory.unsafe_buffer_pointer()
            pointer = ctypes.cast(self._address, ctypes.POINTER(ctypes.c_int32))
            self._words = np.ctypeslib.as_array(pointer, (_WORDS,))
        # Re-entrant: collecting a forgotten stream may ask for a stop while another is asked for.
        self._lock = threading.RLock()

    def request_stop(self) -> None:
        """Ends every launch planned so far after the step it is in, or after its first."""
        with self._lock:
            self._words[:1] += 1  # wraps around, unlike a scalar's sum, which warns

    def current(self) -> Interrupt:
        """Returns what a launch planned now is given."""
        address = np.array([self._address], np.uint64).view(np.int32)
        return Interrupt(address=address, count=np.int32(self._words[0]))
