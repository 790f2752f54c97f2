"""Keeps long work off an asyncio loop: a few threads of their own do it, in the order of arrival.

One long computation on the loop stops every request, `/health` included. The threads are few, and
not asyncio's own: whoever sends large inputs waits for others who do so, and for nobody else.
Callers cut work into slices, so that one input does not hold a thread for long.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

# Tokenising this many characters takes some 10 ms; less is done on the loop.
INLINE_SIZE = 20_000
# Work on more than this many characters or tokens is cut into slices.
SLICE_SIZE = 200_000
THREADS = 2

_threads = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="jdllm-offload")


async def off_loop(
    size: int,
    function: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Returns function(*arguments, **options), which a thread computes if `size` is large.

    `size` is about the number of characters or tokens that the work looks at.
    """
    if size <= INLINE_SIZE:
        return function(*arguments, **options)
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(
        _threads, lambda: context.run(function, *arguments, **options)
    )
