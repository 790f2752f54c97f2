"""Sends requests all at once or as a Poisson process, with a limit of requests at a time."""

from __future__ import annotations

import math
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from jdllm import errors
from jdllm.host import progress

SPARE_FILES = 64
LONGEST_S = 365 * 24 * 3600.0  # a typing error, beyond

Asked = TypeVar("Asked")  # what `send_one` takes, for example a `prompts.Prompt`
Record = TypeVar("Record")  # what it returns, for example a `stats.Record`


def arrivals_s(count: int, request_rate: float, seed: int) -> list[float]:
    """Returns the arrival of each request in seconds from the start; the first is at 0.

    Gaps are exponential with mean 1 / `request_rate`; with an infinite rate all arrive at 0. A rate
    at which the last one would not arrive within a year is a ConfigError.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1.0 / request_rate, count - 1)
    found = [0.0, *np.cumsum(gaps).tolist()]
    if not found[-1] <= LONGEST_S:
        raise errors.ConfigError(
            f"at {request_rate:g} requests per second the last of {count} would arrive after "
            f"{found[-1]:.3g} s, more than a year; raise --request-rate"
        )
    return found


def send(
    send_one: Callable[[Asked], Record],
    asked: Sequence[Asked],
    *,
    at_s: Sequence[float],
    max_concurrency: int | None = None,
    show_progress: bool = True,
) -> tuple[list[Record], float]:
    """Returns the records in the order of the prompts, and the seconds that all of them took.

    Each request has a thread. If `max_concurrency` requests are open, the next one waits; its
    latency begins when it is sent, as in SGLang.
    """
    places = min(max_concurrency or len(asked), len(asked))
    _allow_connections(places)
    free = threading.Semaphore(places)
    records: list[Record | None] = [None] * len(asked)
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work(index: int) -> None:
        try:
            records[index] = send_one(asked[index])
        except BaseException as error:  # a fault of this program, raised again below
            failures.append(error)
        finally:
            free.release()
            with lock:
                bar.update()

    with progress.bar(total=len(asked), is_shown=show_progress, unit="req") as bar:
        began, threads = time.perf_counter(), []
        for index, due_s in enumerate(at_s):
            time.sleep(max(0.0, began + due_s - time.perf_counter()))
            free.acquire()
            # Daemon threads, so that Ctrl-C does not wait for answers.
            threads.append(threading.Thread(target=work, args=(index,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        duration_s = time.perf_counter() - began
    if failures:
        raise failures[0]
    return [record for record in records if record is not None], duration_s


def _allow_connections(count: int) -> None:
    """Raises the limit of open files if `count` connections need more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise errors.ConfigError(
            f"{count} requests at a time need {needed} open files, the limit is {hard}; "
            "give --max-concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
