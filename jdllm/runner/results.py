"""What a launch gave, from arrays on the host to the scheduler's terms."""

from __future__ import annotations

from typing import Any

from jdllm.runner.block import loop as decode_loop
from jdllm.runner.canvas import loop as canvas_loop
from jdllm.scheduler import batch as batch_lib


def launch_result(outputs: Any, num_rows: int) -> batch_lib.LaunchResult:
    """Returns the result of a launch of `num_rows` real rows; a prefill's has nothing in it."""
    match outputs:
        case decode_loop.DecodeOutputs():
            return batch_lib.LaunchResult(
                rows=tuple(_row_result(outputs, i) for i in range(num_rows)),
                num_steps=int(outputs.num_steps),
                num_slots=int(outputs.num_slots),
                used_slots=int(outputs.used_slots),
            )
        case canvas_loop.CanvasOutputs():
            return batch_lib.LaunchResult(
                rows=tuple(_canvas_result(outputs, i) for i in range(num_rows)),
                num_steps=int(outputs.num_steps),
                num_slots=int(outputs.num_tokens),
                used_slots=int(outputs.num_forwarded[:num_rows].sum()),
                num_full=int(outputs.num_full[:num_rows].sum()),
            )
    return batch_lib.LaunchResult()


def _row_result(outputs: decode_loop.DecodeOutputs, i: int) -> batch_lib.RowResult:
    ring = outputs.ring
    return batch_lib.RowResult(
        committed=tuple(
            batch_lib.CommittedBlock(
                tokens=ring.tokens[i, place],
                nfe=int(ring.nfe[i, place]),
                steps=ring.steps[i, place],
                logprobs=ring.logprobs[i, place],
            )
            for place in range(outputs.num_blocks[i])
        ),
        context_len=int(outputs.context_lens[i]),
        nfe=int(outputs.nfe[i]),
        num_edited=int(outputs.num_edited[i]),
        is_invalid=bool(outputs.is_invalid[i]),
    )


def _canvas_result(outputs: canvas_loop.CanvasOutputs, i: int) -> batch_lib.RowResult:
    settled = slice(outputs.settled_before[i], outputs.num_settled[i])
    nfe = int(outputs.nfe[i])
    committed = batch_lib.CommittedBlock(
        tokens=outputs.tokens[i, settled],
        nfe=nfe,
        steps=outputs.steps[i, settled],
        logprobs=outputs.logprobs[i, settled],
    )
    return batch_lib.RowResult(
        committed=(committed,) if len(committed.tokens) else (),
        context_len=0,
        nfe=nfe,
        is_invalid=bool(outputs.is_invalid[i]),
    )
