"""Processes in which the oracle reads pictures, beside those that draw scenes."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import UInt8

from jdllm.tasks.scenes import oracle
from jdllm.train import stop_request

Picture = UInt8[np.ndarray, "H W 3"]
_PER_TURN = 8  # pictures that go to a process at once


class Judges:
    """`num_workers` processes, which begin with the first picture; 0: the caller's own."""

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def wrong(
        self, facts: Sequence[oracle.Facts], pictures: Sequence[Picture]
    ) -> list[tuple[str, ...]]:
        """Returns what the oracle finds wrong with each picture: nothing for one that is right."""
        return list(self.begun(facts, pictures))

    def begun(
        self, facts: Sequence[oracle.Facts], pictures: Sequence[Picture]
    ) -> Iterator[tuple[str, ...]]:
        """Has processes read the pictures and returns what they find, as it is asked for."""
        if not self._num_workers:
            return map(_wrong, facts, pictures)
        with stop_request.unseen_by_children():  # it starts a process if none is idle
            return self._started().map(_wrong, facts, pictures, chunksize=_PER_TURN)

    def _started(self) -> concurrent.futures.Executor:
        if self._pool is None:
            # Forks of a process with device threads may hang, so the processes start afresh.
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._num_workers, mp_context=multiprocessing.get_context("spawn")
            )
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _wrong(facts: oracle.Facts, picture: Picture) -> tuple[str, ...]:
    verdict = oracle.check(facts, picture)
    return () if verdict.is_right else tuple(verdict.wrong) or ("picture",)
