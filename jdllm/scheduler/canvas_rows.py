"""Rows of full-attention models: each holds its whole canvas from admission to its end.

There is no prefill and nothing grows: a row that runs has the pages of its canvas and its
share of the tokens of a forward, so one launch holds all rows and none ever gives way to
another. A row that lost its K,V begins anew from its canvas, in which the tokens that it has
committed are given.

Why nothing hangs: `prepare` refuses a canvas that could not run alone in the pool, and the
bucket's tokens hold the longest canvas. A launch of one size may have no room for a window and end
at once, but only one of a row's stay has a size below its whole canvas.
"""

from __future__ import annotations

import numpy as np

from jdllm import errors
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import buckets as buckets_lib
from jdllm.scheduler import canvas_windows, live_requests
from jdllm.scheduler import limits as limits_lib
from jdllm.scheduler import request as request_lib

TO_BE_WRITTEN = -1
# Of a row's second launch where it is alone: so that it lasts longer than the host needs to start
# the next one (H200, LLaDA-8B: 5 to 9 ms a step, 6 to 13 ms to start one of six sizes).
SECOND_LAUNCH_STEPS = 2


class CanvasRows:
    """Plans launches of whole canvases, and takes in the tokens that settle."""

    def __init__(
        self,
        live: live_requests.LiveRequests,
        limits: limits_lib.Limits,
        buckets: buckets_lib.CanvasBuckets,
        *,
        decode_steps: int,
    ):
        self._live = live
        self._limits = limits
        self._buckets = buckets
        self._decode_steps = decode_steps

    def prepare(self, request: request_lib.Request) -> None:
        """Lays out the canvas; raises a `RequestError` if it could not run alone."""
        self._limits.check(request)
        limits_lib.check_given(request)
        start, written = len(request.prompt_ids), self._written_len(request)
        _check_schedule(request, written, self._limits.context_length)
        self._limits.check_pages(request, start + written + len(request.suffix_ids))
        places = [request.given.get(place, TO_BE_WRITTEN) for place in range(written)]
        request.canvas_ids = request.prompt_ids + places + request.suffix_ids
        request.canvas_end = start + written

    def admit(self, request: request_lib.Request) -> bool:
        """Takes the pages of the whole canvas; False, and nothing changed, without room."""
        rows = [*self._live.running, request]
        tokens = sum(batch_lib.packed_len(len(row.canvas_ids)) for row in rows)
        if tokens > self._buckets.tokens:
            return False
        if not self._live.pages.grow(request, len(request.canvas_ids)):
            return False
        start = len(request.prompt_ids)
        request.canvas_ids[start : request.num_tokens] = request.output_ids
        request.num_settled = 0
        return True

    def plan(self) -> batch_lib.ScheduleBatch | None:
        """Returns a launch of all running requests; None when nothing runs."""
        rows = tuple(
            batch_lib.ScheduledRow(
                request=request,
                start=0,
                num_tokens=len(request.canvas_ids),
                epoch=request.epoch,
                is_fresh=not request.is_decoding,
            )
            for request in self._live.running
        )
        if not rows:
            return None
        bucket, max_steps = self._launch_of(rows)
        for row in rows:
            row.request.planned_steps += max_steps
        return batch_lib.ScheduleBatch(
            rows=rows,
            bucket=bucket,
            max_steps=max_steps,
            max_finished=self._live.max_finished(len(rows)),
        )

    def _launch_of(self, rows: tuple[batch_lib.ScheduledRow, ...]) -> tuple[batch_lib.Bucket, int]:
        """Returns the bucket of a launch and its most steps.

        A row's first forward is one of its whole canvas, and with some options all are. After its
        first one a row alone says what it has. That one is over before the host has started a
        launch of many sizes, so another of one size follows: the size that the first windows need.
        """
        if len(rows) > 1 or not self._buckets.one_size_tokens:
            return self._buckets.canvas(len(rows)), self._decode_steps
        (row,) = rows
        request, most = row.request, row.num_tokens
        if row.is_fresh:
            steps = 1
        elif request.sampling.dllm.forwards_whole_canvas:
            steps = self._decode_steps
        elif request.planned_steps == 1:
            steps = min(SECOND_LAUNCH_STEPS, self._decode_steps)
            most = canvas_windows.first_window(request, steps)
        else:
            return self._buckets.canvas(1), self._decode_steps
        return self._buckets.of_one_size(batch_lib.packed_len(most)), steps

    def append(self, request: request_lib.Request, block: batch_lib.CommittedBlock) -> list[int]:
        """Stores tokens that settled and returns them, without those of an earlier stay.

        Nor those behind an end token: an early stop settles all that follows at once.
        """
        known = len(request.output_ids) - request.num_settled
        request.num_settled += len(block.tokens)
        (ends,) = np.nonzero(np.isin(block.tokens, request.end_token_ids))
        shown = slice(known, ends[0] + 1 if len(ends) else None)
        new = request.extend(block.tokens[shown], block.steps[shown], block.logprobs[shown])
        length = request.sampling.dllm.block_length or self._limits.block_size
        request.num_blocks = -(-len(request.output_ids) // length)
        return new

    def _written_len(self, request: request_lib.Request) -> int:
        """Returns how many positions the canvas has between prompt and suffix.

        Whole blocks where nothing follows, as far as context and pool reach.
        """
        wanted = request.max_new_tokens
        if request.suffix_ids:
            return wanted
        length = request.sampling.dllm.block_length or 1
        room = min(self._limits.context_length, self._limits.pool_tokens) - len(request.prompt_ids)
        return max(wanted, min(-(-wanted // length) * length, room))


def _check_schedule(request: request_lib.Request, written: int, most_steps: int) -> None:
    """Raises unless an algorithm's fixed number of steps divides among whole blocks, and ends."""
    dllm = request.sampling.dllm
    if dllm.steps is not None and dllm.steps > most_steps:
        raise errors.RequestError(
            f"dllm.steps={dllm.steps} exceeds the context length of {most_steps}",
            param="dllm.steps",
        )
    if dllm.block_length is None or (dllm.algorithm != "LLaDA" and dllm.steps is None):
        return
    if dllm.algorithm == "LLaDA" and written % dllm.block_length:
        why = "before a suffix" if request.suffix_ids else "up to the end of context or pool"
        raise errors.RequestError(
            f"max_new_tokens={request.max_new_tokens} makes {written} tokens to write {why}, but "
            f"LLaDA writes whole blocks of dllm.block_length={dllm.block_length}; change one of "
            "them",
            param="max_new_tokens",
        )
    num_blocks = -(-written // dllm.block_length)
    if dllm.steps is not None and dllm.steps % num_blocks:
        raise errors.RequestError(
            f"dllm.steps={dllm.steps} must be a multiple of the {num_blocks} blocks of "
            f"dllm.block_length={dllm.block_length} that max_new_tokens={request.max_new_tokens} "
            "makes",
            param="dllm.steps",
        )
