"""Turns the outputs of a canvas launch, as arrays on the host, into a `LaunchResult`."""

from __future__ import annotations

import numpy as np

from jdllm.runner.canvas import loop
from jdllm.scheduler import text_frames
from jdllm.scheduler.batch import CommittedBlock, Frame, LaunchResult, RowResult, ScheduleBatch
from jdllm.scheduler.request import Request


def of_canvases(
    outputs: loop.CanvasOutputs, batch: ScheduleBatch, *, mask_token_id: int
) -> LaunchResult:
    """Returns the tokens that settled, row by row; rows that show their steps have a picture."""
    real = slice(len(batch.rows))
    forwarded = int(outputs.num_forwarded[real].sum())
    return LaunchResult(
        rows=tuple(
            _row_result(outputs, i, row.request, mask_token_id) for i, row in enumerate(batch.rows)
        ),
        num_steps=int(outputs.num_steps),
        computed_tokens=int(outputs.num_tokens),
        real_tokens=forwarded,
        denoised_tokens=forwarded,
        canvas_tokens=forwarded,
        num_full=int(outputs.num_full[real].sum()),
    )


def _row_result(
    outputs: loop.CanvasOutputs, i: int, request: Request, mask_token_id: int
) -> RowResult:
    settled = slice(outputs.settled_before[i], outputs.num_settled[i])
    nfe = int(outputs.nfe[i])
    committed = CommittedBlock(
        tokens=outputs.tokens[i, settled],
        nfe=nfe,
        steps=outputs.steps[i, settled],
        logprobs=outputs.logprobs[i, settled],
        top_ids=None if outputs.top is None else outputs.top.ids[i, settled],
        top_logprobs=None if outputs.top is None else outputs.top.logprobs[i, settled],
    )
    return RowResult(
        committed=(committed,) if len(committed.tokens) else (),
        nfe=nfe,
        frames=_picture(outputs, i, request, mask_token_id),
        is_invalid=bool(outputs.is_invalid[i]),
    )


def _picture(
    outputs: loop.CanvasOutputs, i: int, request: Request, mask_token_id: int
) -> tuple[Frame, ...]:
    """Returns the output positions of a row that shows its steps, as one frame of the launch."""
    if not request.sampling.shows_steps:
        return ()
    start = len(request.prompt_ids)
    shown = slice(start, start + request.max_new_tokens)
    tokens = np.asarray(outputs.tokens[i, shown])
    steps = np.asarray(outputs.steps[i, shown])
    picture = text_frames.CanvasPicture(
        token_ids=tokens,
        steps=steps,
        logprobs=outputs.logprobs[i, shown],
        # A masked position holds the mask, which is never written.
        is_masked=tokens == mask_token_id,
    )
    return (Frame(step=int(steps.max(initial=0)), value=picture),)
