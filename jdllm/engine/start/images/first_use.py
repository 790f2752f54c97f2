"""Compiles programs beside the launches: when a request first needs them, or after the start.

Image rows ask for all programs that a request needs before they admit it, and for every program
before they plan a launch of it (`ImageRows.programs`). A program that is missing is compiled by
threads of this module; its requests wait, and no others do. The first questions about a size are
about one row, so that its requests start soon. Programs of fewer rows are compiled first: without
those for one row somebody waits, the others only save time.

A start that need not compile everything leaves programs that fewer requests need to this module,
too (`compile_later`): they are compiled like those of few rows that somebody asks for, and then
kept.

A client may walk through thousands of sizes. So at most `MAX_PROGRAMS` are kept beside those of the
start, the least recently used goes first, and at most `MAX_WAITING` wait; further ones are asked
for again by their rows. A program for several rows that needs more memory than is free is not used.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Literal

from jdllm.runner import model_runner
from jdllm.scheduler.batch import Bucket

logger = logging.getLogger(__name__)

MAX_PROGRAMS, MAX_WAITING = 96, 32
State = Literal["ready", "never"]


class FirstUse:
    """Answers which programs are ready; the engine thread asks and, at its end, closes.

    A launch may need `free_bytes` beside weights and memory; None: there is no such bound.
    """

    def __init__(
        self,
        runner: model_runner.ModelRunner,
        *,
        max_programs: int = MAX_PROGRAMS,
        max_waiting: int = MAX_WAITING,
        free_bytes: int | None = None,
        num_threads: int = 1,
    ):
        self._runner = runner
        self._free_bytes = free_bytes
        self._max_programs, self._max_waiting = max_programs, max_waiting
        self._executor = concurrent.futures.ThreadPoolExecutor(
            num_threads, thread_name_prefix="compile"
        )
        self._later: set[Bucket] = set()  # of the start, not compiled yet
        self._asked: set[Bucket] = set()  # by requests, not compiled yet
        self._states: dict[Bucket, State] = {}  # the most recently used last
        self._lock = threading.Lock()  # of the three, and of the numbers
        self._to_compile: queue.PriorityQueue[tuple[int, int, Bucket]] = (
            queue.PriorityQueue()  # by rows, then in the order of the questions
        )
        self._numbers = itertools.count()
        self._is_closed = False
        self.num_compiled = 0
        self.num_failed = 0

    @property
    def num_waiting(self) -> int:
        """Programs that have been asked for, or are to be there anyway, and are not there yet."""
        return len(self._asked) + len(self._later)

    def compile_later(self, buckets: Sequence[Bucket]) -> None:
        """Compiles programs that belong to the start; those for one row that wait go first."""
        if not buckets:
            return
        logger.info("compiling %d more programs while requests run", len(buckets))
        with self._lock:
            self._later.update(buckets)
        for bucket in buckets:
            self._enqueue(bucket)

    def is_ready(self, bucket: Bucket) -> bool:
        """Returns whether a launch of this bucket can start; if not, it can soon.

        If a program for one row cannot be compiled, the launch says so. One for several rows is
        then never ready: its rows have smaller launches.
        """
        with self._lock:
            if state := self._states.pop(bucket, None):
                self._states[bucket] = state  # the most recently used now
                return state == "ready"
            if bucket in self._later or bucket in self._asked:
                return False
        if self._runner.has_program(bucket):
            return True
        with self._lock:
            if self._is_closed or len(self._asked) >= self._max_waiting:
                return False
            self._make_room()
            self._asked.add(bucket)
        logger.warning("compiling %s at its first use; its requests wait, no others do", bucket)
        self._enqueue(bucket)
        return False

    def close(self) -> None:
        """Begins no other compilation; the one that runs, which may take minutes, is left alone.

        It reads shapes only, so that weights and memory may be freed meanwhile.
        """
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _enqueue(self, bucket: Bucket) -> None:
        self._to_compile.put((bucket.rows, next(self._numbers), bucket))
        self._executor.submit(self._compile_next)

    def _make_room(self) -> None:
        """Forgets the least recently used program if there are too many.

        A launch is started in the round that asked for its program, so no other round needs it.
        """
        if len(self._states) >= self._max_programs:
            bucket = next(iter(self._states))
            del self._states[bucket]
            self._runner.forget(bucket)
            logger.info("forgot %s, which was not used for long", bucket)

    def _compile_next(self) -> None:
        _, _, bucket = self._to_compile.get_nowait()
        began_s = time.monotonic()
        try:
            self._runner.compile([bucket])
        except Exception:
            logger.exception("%s cannot be compiled", bucket)
            # The launch for one row raises it again, for those who asked.
            self._ends(bucket, "ready" if bucket.rows == 1 else "never")
            with self._lock:
                self.num_failed += 1
            return
        with self._lock:
            self.num_compiled += 1
        logger.info("compiled %s in %.1f s", bucket, time.monotonic() - began_s)
        self._ends(bucket, "ready" if self._fits(bucket) else "never")

    def _fits(self, bucket: Bucket) -> bool:
        if bucket.rows == 1 or self._free_bytes is None:
            return True
        needed = self._runner.bytes_by_bucket[bucket]
        if needed <= self._free_bytes:
            return True
        logger.warning(
            "%s needs %.2f GB and %.2f GB are free: smaller launches instead",
            bucket, needed / 1e9, self._free_bytes / 1e9,
        )  # fmt: skip
        return False

    def _ends(self, bucket: Bucket, state: State) -> None:
        with self._lock:
            if bucket in self._later:
                self._later.discard(bucket)
                if not self._later:
                    logger.info("all programs of the start are there")
                if state == "ready":
                    return  # the runner has it, and it is never forgotten
            # The most recently used now: those who asked for it have not come back yet.
            self._asked.discard(bucket)
            self._states[bucket] = state
