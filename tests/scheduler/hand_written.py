"""A scheduler with block 4 and page 4, and results of launches written by hand."""

import numpy as np

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
        "policy": "fcfs",
        "prefix_cache": None,
        "mask_token_id": MASK,
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


def fresh_block():
    masked = np.ones(B, bool)
    return request.BlockRow(
        tokens=np.full(B, MASK, np.int32), masked=masked, editable=masked.copy()
    )


def write(one, value=5, *, is_final=True, is_done=False, extra=None):
    """One step that writes `value` on every editable position (all at once)."""
    block, context_len, committed = one.block, one.context_len, ()
    tokens = np.where(block.editable, value, block.tokens)
    if is_final and not block.is_final:
        committed = (batch_lib.CommittedBlock(tokens=tokens, nfe=1),)
    after = request.BlockRow(
        tokens=tokens,
        masked=np.zeros(B, bool) if is_final else block.masked,
        editable=block.editable,
        step=block.step + (not block.is_final),
        is_final=is_final,
        extra=extra,
    )
    if is_done:
        after, context_len = fresh_block(), context_len + B
    return batch_lib.RowResult(committed=committed, block=after, context_len=context_len, nfe=1)


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
