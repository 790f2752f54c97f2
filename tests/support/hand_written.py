"""A scheduler with block 4 and page 4, and results of launches written by hand."""

import numpy as np
from support.hash_model import committed_block

from jdllm.options import sampling_params
from jdllm.scheduler import request, scheduler
from jdllm.scheduler.batch import LaunchResult, RowResult
from jdllm.scheduler.rows import block, interface

B, MASK, EOS = 4, 0, 99


def make(*, buckets=None, max_queued_requests=None, policy="fcfs", **changes):
    sizes = {
        "block_size": B,
        "page_size": 4,
        "num_pages": 32,
        "max_running_requests": 4,
        "context_length": 64,
        "prefill_token_budget": 16,
    } | changes
    config = interface.RowConfig(
        **{"max_prefill_tokens": sizes["prefill_token_budget"]} | sizes,
    )
    rows = block.BlockRows.build(config) if buckets is None else block.BlockRows(config, buckets)
    return scheduler.Scheduler(rows, max_queued_requests=max_queued_requests, policy=policy)


def ask(name, prompt, max_new=8, **sampling):
    return request.Request(
        request_id=name,
        prompt_ids=list(prompt),
        sampling=sampling_params.SamplingParams(**sampling),
        max_new_tokens=max_new,
        eos_token_ids=(EOS,),
    )


def write(one, value=5, *, is_final=True, is_done=False):
    """A launch of one step that makes the request's block final, unless it was, or persists it."""
    committed = ()
    if is_final and one.num_tokens - one.held.context_len < B:
        head = one.tokens(one.held.context_len, one.num_tokens)
        tokens = np.full(B, value, np.int32)
        tokens[: len(head)] = head
        committed = (committed_block(tokens, 1),)
    context_len = one.held.context_len + (B if is_done else 0)
    return RowResult(committed=committed, context_len=context_len, nfe=1)


def results_of(rows):
    return LaunchResult(rows=tuple(rows))


def written(batch, **result):
    """The result of a launch in which every row that denoises writes its whole block."""
    denoises = batch.bucket.denoises
    return results_of(
        write(row.request, **result) if denoises else RowResult() for row in batch.rows
    )


def round_of(made, **result):
    """One round in which every decode row writes its whole block; returns batch, outputs."""
    batch = made.schedule()
    return batch, made.process_results(batch, written(batch, **result))


def names(batch):
    return [row.request.request_id for row in batch.rows]
