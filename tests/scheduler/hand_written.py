"""A scheduler with block 4 and page 4, and results of launches written by hand."""

import numpy as np
from hash_model import committed_block

from jdllm import sampling_params
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import buckets, request, scheduler

B, MASK, EOS = 4, 0, 99


def make(**changes):
    rows = changes.get("max_running_requests", 4)
    budget = changes.get("prefill_token_budget", 16)
    options = {
        "block_size": B,
        "page_size": 4,
        "num_pages": 32,
        "max_running_requests": rows,
        "max_queued_requests": None,
        "context_length": 64,
        "buckets": buckets.Buckets.default(rows, budget, B),
        "prefill_token_budget": budget,
        "max_prefill_tokens": budget,
        "policy": "fcfs",
        "prefix_cache": None,
        "detokenize": None,
    }
    return scheduler.Scheduler(**(options | changes))


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
    if is_final and one.num_tokens - one.context_len < B:
        head = one.tokens(one.context_len, one.num_tokens)
        tokens = np.full(B, value, np.int32)
        tokens[: len(head)] = head
        committed = (committed_block(tokens, 1),)
    context_len = one.context_len + (B if is_done else 0)
    return batch_lib.RowResult(committed=committed, context_len=context_len, nfe=1)


def results_of(rows):
    return batch_lib.LaunchResult(rows=tuple(rows))


def round_of(made, **result):
    """One round in which every decode row writes its whole block; returns batch, outputs."""
    batch = made.schedule()
    rows = ()
    if batch.phase is batch_lib.Phase.DECODE:
        rows = [write(row.request, **result) for row in batch.rows]
    return batch, made.process_results(batch, results_of(rows))


def names(batch):
    return [row.request.request_id for row in batch.rows]
