"""Shared by kinds of rows that write tokens: turns committed blocks into output, up to its end."""

from __future__ import annotations

from collections.abc import Callable

from jdllm.scheduler import text_frames
from jdllm.scheduler.batch import CommittedBlock, RowResult
from jdllm.scheduler.commits import Progress
from jdllm.scheduler.finish import Detokenize, check_request
from jdllm.scheduler.request import Request

# Stores a committed block in the request and returns the tokens that are new output.
Append = Callable[[Request, CommittedBlock], list[int]]


def apply(
    request: Request,
    result: RowResult,
    append: Append,
    detokenize: Detokenize | None,
) -> Progress:
    """Appends the blocks that became final; the earliest end cuts the output."""
    nfe, new = request.nfe, []
    request.num_edited += result.num_edited
    for done, committed in enumerate(result.committed, start=1):
        request.nfe = nfe + committed.nfe
        tokens = append(request, committed)
        finish = check_request(request, len(tokens), detokenize)
        if finish is None:
            new += tokens
            continue
        surplus = len(request.output_ids) - finish.finished_len
        unseen = sum(len(later.tokens) for later in result.committed[done:])
        request.num_discarded += surplus + unseen
        request.truncate(finish.finished_len)
        new += tokens[: len(tokens) - surplus]
        frames = text_frames.ending(result.frames, finish.finished_len)
        return Progress(new_token_ids=new, frames=frames, finish=finish)
    request.nfe = nfe + result.nfe
    return Progress(new_token_ids=new, frames=result.frames)
