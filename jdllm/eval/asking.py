"""Asks a backend many things at a time: threads ask, the calling thread takes what comes.

The caller alone writes to the store, so a stop at any moment leaves whole records. The first
failure, and whatever ends the caller, aborts the rest.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from jdllm.eval import backends

Wanted = TypeVar("Wanted")
Answer = TypeVar("Answer")


def in_threads(
    ask: Callable[[Wanted], Answer],
    wanted: Iterable[Wanted],
    *,
    parallel: int,
    name: Callable[[Wanted], str],
    abort: Callable[[], object],
) -> Generator[tuple[Wanted, Answer]]:
    """Yields (what was wanted, the answer to it) as answers come, up to `parallel` at a time.

    A `BackendError` gets the `name` of what failed. `abort` ends what the backend still runs.
    """
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=parallel)
    try:
        waiting = {pool.submit(ask, one): one for one in wanted}
        for future in concurrent.futures.as_completed(waiting):
            one = waiting[future]
            try:
                answer = future.result()
            except backends.BackendError as error:
                raise backends.BackendError(f"{name(one)}: {error}") from error
            yield one, answer
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        abort()
        raise
    finally:
        pool.shutdown()
