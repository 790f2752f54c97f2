"""How the host ends running launches: they read a flag in host memory after every step.

The flag is a counter. A launch gets the value that the counter has when the launch is planned, and
ends when it reads another value. To end launches, the host increments the counter. So one call
ends all launches in flight and none that is planned later, and nothing has to be reset. Where no
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
from jaxtyping import Array, Bool, Int32, Shaped

import pallas_kernels
from jdllm.device import devices, sharding

_WORDS = 64  # cache lines that hold nothing else; the first word is the flag


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """What a launch gets: the address of the flag, and the count at which the launch goes on.

    `address` holds the low and the high half; zeros mean that there is no flag to read. The
    fields are numpy's on the host and traced in the launch.
    """

    address: Int32[Any, " 2"]
    count: Int32[Any, ""]

    def stop_requested(self, flag: Int32[Array, ""]) -> Bool[Array, ""]:
        """Returns whether the host has asked for an end since it planned the launch."""
        return flag != self.count

    def poll(
        self, after: Shaped[Array, " ..."], *, implementation: str, num_ranks: int = 1
    ) -> Int32[Array, ""]:
        """Returns the flag, read after `after` has been computed.

        Ranks read it at different moments, and must leave the loop together: rank 0 decides.
        """
        flag = pallas_kernels.read_cancel_flag(
            self.address, self.count, after, implementation=implementation
        )
        is_read = pallas_kernels.choose_read_cancel_flag(implementation).implementation != "xla"
        return sharding.of_first_rank(flag) if num_ranks > 1 and is_read else flag


def shapes() -> Interrupt:
    """Returns the shapes of an `Interrupt`, for tracing: no kernel may read its address."""
    shape = jax.ShapeDtypeStruct
    return Interrupt(address=shape((2,), np.int32), count=shape((), np.int32))


class Interrupts:
    """Owns the flag; `request_stop` may be called by any thread."""

    def __init__(self, *, implementation: str = "auto"):
        chosen = pallas_kernels.choose_read_cancel_flag(implementation)
        self._words, self._address = np.zeros((_WORDS,), np.int32), 0
        if chosen.implementation != "xla":
            pinned = jax.sharding.SingleDeviceSharding(devices.used(), memory_kind="pinned_host")
            self._memory = jax.block_until_ready(jax.device_put(self._words, pinned))
            self._address = self._memory.unsafe_buffer_pointer()
            pointer = ctypes.cast(self._address, ctypes.POINTER(ctypes.c_int32))
            self._words = np.ctypeslib.as_array(pointer, (_WORDS,))
        # Re-entrant: inside `request_stop`, garbage collection of an abandoned stream may call it
        # again.
        self._lock = threading.RLock()

    def request_stop(self) -> None:
        """Ends every launch planned so far after its present step, or after its first."""
        with self._lock:
            self._words[:1] += 1  # wraps around silently; adding to a numpy scalar would warn

    def current(self) -> Interrupt:
        """Returns what a launch that is planned now gets."""
        address = np.array([self._address], np.uint64).view(np.int32)
        return Interrupt(address=address, count=np.int32(self._words[0]))
