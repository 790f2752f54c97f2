"""Turns the outputs of a launch of this kind, as arrays on the host, into a `LaunchResult`."""

from __future__ import annotations

from typing import Any

from jaxtyping import Int32

from jdllm.runner.uniform import loop
from jdllm.scheduler.batch import CommittedBlock, LaunchResult, RowResult, ScheduleBatch


def of_encode(num_tokens: Int32[Any, ""], batch: ScheduleBatch) -> LaunchResult:
    """Returns the result of an encode launch, which commits nothing."""
    return LaunchResult(
        rows=(RowResult(),) * len(batch.rows),
        computed_tokens=batch.bucket.tokens,
        real_tokens=int(num_tokens),
    )


def of_canvas(
    outputs: loop.CanvasOutputs, batch: ScheduleBatch, *, block_size: int
) -> LaunchResult:
    """Returns the canvases that are done, row by row."""
    rows = tuple(_row_result(outputs, i) for i in range(len(batch.rows)))
    return LaunchResult(
        rows=rows,
        num_steps=int(outputs.num_steps),
        computed_tokens=int(outputs.num_steps) * batch.bucket.tokens,
        real_tokens=int(outputs.real_canvases) * block_size,
        denoised_tokens=sum(row.nfe for row in rows) * block_size,
    )


def _row_result(outputs: loop.CanvasOutputs, i: int) -> RowResult:
    committed = ()
    if outputs.is_new[i]:
        done = CommittedBlock(
            tokens=outputs.tokens[i],
            nfe=int(outputs.nfe[i]),
            steps=outputs.steps[i],
            logprobs=outputs.logprobs[i],
        )
        committed = (done,)
    return RowResult(
        committed=committed, nfe=int(outputs.nfe[i]), is_invalid=bool(outputs.is_invalid[i])
    )
