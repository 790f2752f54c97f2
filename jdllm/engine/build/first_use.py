"""Compiles programs when a request first needs them, beside the launches of the others.

Image rows ask for every program before they plan a launch of it (`ImageRows.is_ready`). A program
that is missing is compiled by one thread; its rows wait, and no others do. The first question about
a size is about one row, so that its requests start soon. Programs of fewer rows are compiled first:
without those for one row somebody waits, the others only save time.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import queue
import time

from jdllm.runner import model_runner
from jdllm.scheduler import batch as batch_lib

logger = logging.getLogger(__name__)


class FirstUse:
    """Answers which programs are ready; the engine thread asks and, at its end, closes."""

    def __init__(self, runner: model_runner.ModelRunner):
        self._runner = runner
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._asked: set[batch_lib.Bucket] = set()
        self._ready: set[batch_lib.Bucket] = set()  # of those
        self._to_compile: queue.PriorityQueue[tuple[int, int, batch_lib.Bucket]] = (
            queue.PriorityQueue()  # by rows, then in the order of the questions
        )
        self._numbers = itertools.count()
        self._is_closed = False
        self.num_compiled = 0
        self.num_failed = 0

    @property
    def num_waiting(self) -> int:
        """Programs that have been asked for and are not there yet."""
        return len(self._asked) - self.num_compiled - self.num_failed

    def is_ready(self, bucket: batch_lib.Bucket) -> bool:
        """Returns whether a launch of this bucket can start; if not, it can soon.

        If a program for one row cannot be compiled, the launch says so. One for several rows is
        then never ready: its rows have smaller launches.
        """
        if bucket in self._asked:
            return bucket in self._ready
        if self._runner.has_program(bucket):
            return True
        if not self._is_closed:
            self._asked.add(bucket)
            logger.warning("compiling %s at its first use; its requests wait, no others do", bucket)
            self._to_compile.put((bucket.rows, next(self._numbers), bucket))
            self._executor.submit(self._compile_next)
        return False

    def close(self) -> None:
        """Begins no other compilation; the one that runs, which may take minutes, is left alone.

        It reads shapes only, so that weights and memory may be freed meanwhile.
        """
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _compile_next(self) -> None:
        _, _, bucket = self._to_compile.get_nowait()
        began_s = time.monotonic()
        try:
            self._runner.compile([bucket])
        except Exception:
            logger.exception("%s cannot be compiled", bucket)
            if bucket.rows == 1:  # the launch raises it again, for those who asked
                self._ready.add(bucket)
            self.num_failed += 1
            return
        self._ready.add(bucket)
        self.num_compiled += 1
        logger.info("compiled %s in %.1f s", bucket, time.monotonic() - began_s)
