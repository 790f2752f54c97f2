"""Measures for how long an asyncio loop does nothing else while something runs on it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncGenerator

# A machine may be busy. What these tests are about took from 4 s to minutes.
LONGEST_STALL_S = 1.0
MEASURED_EVERY_S = 0.005


@contextlib.asynccontextmanager
async def no_long_stall() -> AsyncGenerator[None, None]:
    """Fails if the loop stands still for long; what was made before is kept from the collector.

    A server does that too: the objects of JAX and of the tokenizer take it half a second.
    """
    gc.freeze()
    stalls = [0.0]

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(MEASURED_EVERY_S)
            stalls.append(time.monotonic() - began)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.sleep(2 * MEASURED_EVERY_S)
        yield
        await asyncio.sleep(2 * MEASURED_EVERY_S)
    finally:
        watching.cancel()
        gc.unfreeze()
    assert max(stalls) < LONGEST_STALL_S
