"""The host side of a third kind of rows: no pages, and a number of steps known from the start.

A request writes no tokens. It computes a vector of numbers in `max_new_tokens` steps, and each
step gives a frame: the vector after that step.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from jdllm import errors
from jdllm.scheduler import sizes
from jdllm.scheduler.batch import Bucket, RowResult, ScheduleBatch, ScheduledRow
from jdllm.scheduler.commits import FinishReason, Progress
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows import interface
from jdllm.scheduler.stay import Stay


class ToyBucket(Bucket):
    """Up to `rows` rows, of one position each."""

    name = "toy"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ToyStay(Stay):
    """A row on the device, and the steps that its launches have told of."""

    num_steps: int = 0


class ToyRows:
    """One launch holds all running rows."""

    defaults: ClassVar[interface.RowDefaults] = interface.RowDefaults(
        cpu_rows=2, accelerator_rows=4
    )

    def __init__(self, config: interface.RowConfig):
        self.live = config.live_requests()
        self._decode_steps = config.decode_steps
        self._sizes = tuple(sorted({1, config.max_running_requests}))

    @classmethod
    def build(cls, config: interface.RowConfig) -> Self:
        return cls(config)

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def buckets(self) -> list[Bucket]:
        return [ToyBucket(rows=rows, tokens=rows) for rows in self._sizes]

    def default_new_tokens(self, prompt_len: int, block_length: int | None) -> int:
        return 1

    def prepare(self, request: Request) -> None:
        if request.max_new_tokens < 1:
            raise errors.RequestError("steps must be at least 1", param="num_inference_steps")

    def admit(self, request: Request) -> ToyStay | None:
        return ToyStay(slot=self.live.next_slot)

    def plan(self) -> ScheduleBatch | None:
        rows = tuple(
            ScheduledRow(
                request=one, stay=one.held, start=0, num_tokens=1, is_fresh=one.held.is_fresh
            )
            for one in self.live.running
        )
        if not rows:
            return None
        for row in rows:
            row.stay.is_fresh = False
        size = sizes.smallest(self._sizes, len(rows), "rows")
        return ScheduleBatch(
            rows=rows,
            bucket=ToyBucket(rows=size, tokens=size),
            max_steps=self._decode_steps,
            max_finished=self.live.max_finished(len(rows)),
        )

    def apply(self, request: Request, result: RowResult) -> Progress:
        request.nfe += result.nfe
        finish = None
        if result.product is not None:
            finish = FinishReason(kind="length", finished_len=0)
        return Progress(frames=result.frames, finish=finish, product=result.product)

    def settle(self, request: Request, result: RowResult) -> None:
        stay = request.held
        assert isinstance(stay, ToyStay)
        stay.num_steps += result.nfe

    def steps_left(self, request: Request) -> float:
        stay = request.held
        assert isinstance(stay, ToyStay)
        return request.max_new_tokens - stay.num_steps
