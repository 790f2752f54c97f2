"""Shared by kinds of rows that write tokens: turns committed blocks into output, up to its end."""

from __future__ import annotations

from collections.abc import Callable

from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import commits as commits_lib
from jdllm.scheduler import finish as finish_lib
from jdllm.scheduler import request as request_lib
from jdllm.scheduler import text_frames

# Stores a committed block in the request and returns the tokens that are new output.
Append = Callable[[request_lib.Request, batch_lib.CommittedBlock], list[int]]


def apply(
    request: request_lib.Request,
    result: batch_lib.RowResult,
    append: Append,
    detokenize: finish_lib.Detokenize | None,
) -> commits_lib.Progress:
    """Appends the blocks that became final; the earliest end cuts the output."""
    nfe, new = request.nfe, []
    request.num_edited += result.num_edited
    for done, committed in enumerate(result.committed, start=1):
        request.nfe = nfe + committed.nfe
        tokens = append(request, committed)
        finish = finish_lib.check_request(request, len(tokens), detokenize)
        if finish is None:
            new += tokens
            continue
        surplus = len(request.output_ids) - finish.finished_len
        unseen = sum(len(later.tokens) for later in result.committed[done:])
        request.num_discarded += surplus + unseen
        request.truncate(finish.finished_len)
        new += tokens[: len(tokens) - surplus]
        frames = text_frames.ending(result.frames, finish.finished_len)
        return commits_lib.Progress(new_token_ids=new, frames=frames, finish=finish)
    request.nfe = nfe + result.nfe
    return commits_lib.Progress(new_token_ids=new, frames=result.frames)
