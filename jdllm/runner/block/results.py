"""Turns the outputs of a block launch, as arrays on the host, into a `LaunchResult`."""

from __future__ import annotations

from typing import Any

from jaxtyping import Int32

from jdllm.runner.block import frames
from jdllm.runner.block.outputs import DenoiseOutputs, FinishedBlocks
from jdllm.scheduler.batch import CommittedBlock, LaunchResult, RowResult, ScheduleBatch
from jdllm.scheduler.request import Request


def of_prefill(num_tokens: Int32[Any, ""], batch: ScheduleBatch) -> LaunchResult:
    """Returns the result of a prefill, which commits no block."""
    return LaunchResult(
        rows=(RowResult(),) * len(batch.rows),
        computed_tokens=batch.bucket.tokens,
        real_tokens=int(num_tokens),
    )


def of_denoise(outputs: DenoiseOutputs, batch: ScheduleBatch, *, block_size: int) -> LaunchResult:
    """Returns the blocks that became final, row by row."""
    rows = tuple(_row_result(outputs, i, row.request) for i, row in enumerate(batch.rows))
    return LaunchResult(
        rows=rows,
        num_steps=int(outputs.num_steps),
        computed_tokens=int(outputs.computed_tokens),
        real_tokens=int(outputs.real_tokens),
        denoised_tokens=sum(row.nfe for row in rows) * block_size,
    )


def _row_result(outputs: DenoiseOutputs, i: int, request: Request) -> RowResult:
    blocks, shown = outputs.blocks, ()
    if request.sampling.shows_steps:
        shown = frames.of_row(outputs.frames, i, request)
    return RowResult(
        committed=tuple(_block(blocks, i, place) for place in range(outputs.num_blocks[i])),
        context_len=int(outputs.context_lens[i]),
        nfe=int(outputs.nfe[i]),
        num_edited=int(outputs.num_edited[i]),
        frames=shown,
        is_invalid=bool(outputs.is_invalid[i]),
    )


def _block(blocks: FinishedBlocks, i: int, place: int) -> CommittedBlock:
    count = None if blocks.counts is None else int(blocks.counts[i, place])
    return CommittedBlock(
        tokens=blocks.tokens[i, place, :count],
        nfe=int(blocks.nfe[i, place]),
        steps=blocks.steps[i, place, :count],
        logprobs=blocks.logprobs[i, place, :count],
        top_ids=None if blocks.top is None else blocks.top.ids[i, place, :count],
        top_logprobs=None if blocks.top is None else blocks.top.logprobs[i, place, :count],
    )
