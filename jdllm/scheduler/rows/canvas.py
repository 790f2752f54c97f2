"""Rows of full-attention models: each holds its whole canvas from admission to its end.

There is no prefill and nothing grows: a row that runs has the pages of its canvas and its
share of the tokens of a forward, so one launch holds all rows and none ever gives way to
another. A row that lost its K,V begins anew from its canvas, in which the tokens that it has
committed are given.

Why nothing hangs: `prepare` refuses a canvas that could not run alone in the pool, and the
bucket's tokens hold the longest canvas.
"""

from __future__ import annotations

import numpy as np

from jdllm import errors
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import buckets as buckets_lib
from jdllm.scheduler import limits as limits_lib
from jdllm.scheduler import live_requests
from jdllm.scheduler import request as request_lib

TO_BE_WRITTEN = -1


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
        for row in rows:
            row.request.is_decoding = True
        bucket, max_steps = self._launch_of(rows)
        return batch_lib.ScheduleBatch(
            rows=rows,
            bucket=bucket,
            max_steps=max_steps,
            max_finished=self._live.max_finished(len(rows)),
        )

    def _launch_of(self, rows: tuple[batch_lib.ScheduledRow, ...]) -> tuple[batch_lib.Bucket, int]:
        """Returns the bucket of a launch and its most steps.

        A row's first forward is one of its whole canvas, and with some options all are. After its
        first one a row alone says what it has.
        """
        tokens = sum(batch_lib.packed_len(row.num_tokens) for row in rows)
        if len(rows) == 1 and self._buckets.whole_tokens:
            (row,) = rows
            whole = self._buckets.whole_canvas(tokens)
            if row.is_fresh:
                return whole, 1
            if row.request.sampling.dllm.forwards_whole_canvas:
                return whole, self._decode_steps
        return self._buckets.canvas(len(rows), tokens), self._decode_steps

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
    if dllm.block_length is None or (not dllm.writes_whole_blocks and dllm.steps is None):
        return
    if dllm.writes_whole_blocks and written % dllm.block_length:
        why = "before a suffix" if request.suffix_ids else "up to the end of context or pool"
        raise errors.RequestError(
            f"max_new_tokens={request.max_new_tokens} makes {written} tokens to write {why}, but "
            f"{dllm.algorithm} writes whole blocks of dllm.block_length={dllm.block_length}; "
            "change one of them",
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
