"""Turns the outputs of a canvas launch, as arrays on the host, into a `LaunchResult`."""

from __future__ import annotations

from jdllm.runner.canvas import loop
from jdllm.scheduler import batch as batch_lib


def of_canvases(
    outputs: loop.CanvasOutputs, batch: batch_lib.ScheduleBatch
) -> batch_lib.LaunchResult:
    """Returns the tokens that settled, row by row."""
    real = slice(len(batch.rows))
    forwarded = int(outputs.num_forwarded[real].sum())
    return batch_lib.LaunchResult(
        rows=tuple(_row_result(outputs, i) for i in range(len(batch.rows))),
        num_steps=int(outputs.num_steps),
        computed_tokens=int(outputs.num_tokens),
        real_tokens=forwarded,
        denoised_tokens=forwarded,
        canvas_tokens=forwarded,
        num_full=int(outputs.num_full[real].sum()),
    )


def _row_result(outputs: loop.CanvasOutputs, i: int) -> batch_lib.RowResult:
    settled = slice(outputs.settled_before[i], outputs.num_settled[i])
    nfe = int(outputs.nfe[i])
    committed = batch_lib.CommittedBlock(
        tokens=outputs.tokens[i, settled],
        nfe=nfe,
        steps=outputs.steps[i, settled],
        logprobs=outputs.logprobs[i, settled],
        top_ids=None if outputs.top is None else outputs.top.ids[i, settled],
        top_logprobs=None if outputs.top is None else outputs.top.logprobs[i, settled],
    )
    return batch_lib.RowResult(
        committed=(committed,) if len(committed.tokens) else (),
        nfe=nfe,
        is_invalid=bool(outputs.is_invalid[i]),
    )
