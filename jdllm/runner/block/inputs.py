"""What block launches get from the host: a `ScheduleBatch` becomes padded numpy arrays.

Shapes depend on the bucket alone. Padding rows have `kv_lens` 0 and write nowhere;
padding tokens lie past `cu_q_lens[-1]`. The arrays are numpy's on the host and traced in the
launch, hence `Any` in their types.

Letters: R rows, L tokens of a block, T packed tokens, S tokens of the longest row, M its pages, E
end tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int32

from jdllm.algorithms import lookup
from jdllm.decoding.block import interface
from jdllm.options import sampling_params
from jdllm.runner import logit_rows, paging, row_options
from jdllm.runner.block import sampling
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import driver, interrupts
from jdllm.scheduler.batch import ScheduleBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenoiseInputs:
    """What the host knows of the rows; their blocks are on the device, in the row state of `slot`.

    A fresh row begins with this launch: `tokens`, `context_lens` and `tokens_left` describe its
    first block, whose leading `head_lens` tokens belong to the prompt. Padding rows have a slot
    past the last. `capacity` is the number of tokens that the row's pages hold. `end_ids` holds
    end tokens, -1 where there is none. `algorithm` is an index into the compiled
    algorithms. Launches without rows that need their logits have no `logits` and no `history`.
    `history` holds all tokens of a fresh row that needs its logits.
    """

    slot: Int32[Any, " R"]
    is_fresh: Bool[Any, " R"]
    tokens: Int32[Any, "R L"]
    head_lens: Int32[Any, " R"]
    context_lens: Int32[Any, " R"]
    tokens_left: Int32[Any, " R"]
    page_table: Int32[Any, "R M"]
    capacity: Int32[Any, " R"]
    end_ids: Int32[Any, "R E"]
    algorithm: Int32[Any, " R"]
    params: interface.BlockParams
    sampling: sampling.SamplingRows
    limits: driver.LaunchLimits
    logits: logit_rows.LogitRows | None = None
    history: Int32[Any, "R S"] | None = None


def build_denoise(
    batch: ScheduleBatch,
    config: StepConfig,
    interrupt: interrupts.Interrupt,
    *,
    with_logits: bool,
) -> DenoiseInputs:
    """Stacks the rows' slots, first blocks and options and pads to the bucket."""
    R, L = batch.bucket.rows, config.block_size
    context_lens = np.zeros((R,), np.int32)
    slot, is_fresh = np.full((R,), config.num_slots, np.int32), np.zeros((R,), bool)
    tokens = np.full((R, L), config.mask_token_id, np.int32)
    head_lens, tokens_left = np.zeros((R,), np.int32), np.zeros((R,), np.int32)
    capacity, end_ids = (
        np.zeros((R,), np.int32),
        np.full((R, row_options.MAX_END_IDS), row_options.NO_ID, np.int32),
    )
    algorithm = np.zeros((R,), np.int32)
    params = lookup.padding(lookup.BLOCK, R)
    temperature, top_p = np.zeros((R,), np.float32), np.ones((R,), np.float32)
    top_k, seed = np.zeros((R,), np.int32), np.zeros((R, 2), np.uint32)
    for i, row in enumerate(batch.rows):
        request = row.request
        slot[i], is_fresh[i] = row.stay.slot, row.is_fresh
        context_lens[i] = row.start
        if row.is_fresh:
            head = request.tokens(row.start, request.num_tokens)
            tokens[i, : len(head)], head_lens[i] = head, len(head)
            tokens_left[i] = request.max_new_tokens - len(request.output_ids)
        capacity[i] = len(row.stay.pages) * config.pool.page_size
        row_options.fill_end_ids(end_ids[i], request)
        dllm = request.sampling.dllm
        algorithm[i] = config.algorithms.index(dllm.algorithm)
        lookup.fill(params, i, dllm.algorithm, dllm.options, row_length=L)
        temperature[i], top_p[i], top_k[i] = _sampling_of(request.sampling)
        seed[i] = row_options.seed_words(request.seed)
    return DenoiseInputs(
        slot=slot,
        is_fresh=is_fresh,
        tokens=tokens,
        head_lens=head_lens,
        context_lens=context_lens,
        tokens_left=tokens_left,
        page_table=paging.page_table(batch, config),
        capacity=capacity,
        end_ids=end_ids,
        algorithm=algorithm,
        params=interface.BlockParams(**params),
        sampling=sampling.SamplingRows(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        ),
        limits=driver.LaunchLimits.of(batch, interrupt),
        logits=logit_rows.build(batch, config.spec.vocab_size) if with_logits else None,
        history=_history(batch, config) if with_logits else None,
    )


def _history(batch: ScheduleBatch, config: StepConfig) -> Int32[np.ndarray, "R S"]:
    history = np.zeros((batch.bucket.rows, config.block_context), np.int32)
    for i, row in enumerate(batch.rows):
        if row.is_fresh and row.request.sampling.needs_logits:
            history[i, : row.request.num_tokens] = row.request.token_ids
    return history


def _sampling_of(options: sampling_params.SamplingParams) -> tuple[float, float, int]:
    """Returns (temperature, top_p, top_k); the row is greedy if temperature is 0 or top_k is 1."""
    temperature = options.temperature or 0.0
    top_k = options.top_k or 0
    if top_k == 1:
        temperature = 0.0
    return temperature, options.top_p or 1.0, max(top_k, 0)
