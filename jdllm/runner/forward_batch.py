"""The door between host and device: a `ScheduleBatch` becomes padded numpy arrays.

Shapes depend on the bucket alone. Padding rows have `kv_len` 0 and write nowhere;
padding tokens lie past `cu_q_lens[-1]`. Both trees are flat dataclasses of arrays, so
that a launch is one transfer of a few small leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jdllm import decoding, sampling_params
from jdllm.decoding import interface, sampling
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import request as request_lib

# End tokens that a row can stop at on the device; of more, the host finds the rest.
MAX_STOP_IDS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInputs:
    """Whole committed blocks of several requests, packed: T tokens, R rows, M pages a row."""

    tokens: Any  # [T] int32
    cu_q_lens: Any  # [R + 1] int32
    context_lens: Any  # [R] int32
    kv_lens: Any  # [R] int32, 0 for padding rows
    page_table: Any  # [R, M] int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The in-flight block of each of R rows; the state of every compiled algorithm rides along.

    `capacity`: tokens that the row's pages hold. `stop_ids` holds up to S end and stop
    tokens, -1 for none. `yields_on_finish`: the launch ends when a row finishes.
    """

    tokens: Any  # [R, L] int32
    masked: Any  # [R, L] bool
    editable: Any  # [R, L] bool
    context_lens: Any  # [R] int32
    kv_lens: Any  # [R] int32, 0 for padding rows
    page_table: Any  # [R, M] int32
    step: Any  # [R] int32
    is_final: Any  # [R] bool
    tokens_left: Any  # [R] int32
    capacity: Any  # [R] int32
    stop_ids: Any  # [R, S] int32
    algorithm: Any  # [R] int32, index into the compiled algorithms
    params: interface.BlockParams
    sampling: sampling.SamplingRows
    extra: Any  # one tree per compiled algorithm
    max_steps: Any  # int32 scalar
    yields_on_finish: Any  # bool scalar


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What, beside the bucket, fixes shapes: block and page length, pages a row, algorithms."""

    block_size: int
    page_size: int
    pages_per_row: int
    algorithms: tuple[str, ...]

    def initial_extra(self, rows: int) -> tuple[Any, ...]:
        """Returns zeroed numpy state of each compiled algorithm for `rows` rows."""
        return jax.tree.map(
            lambda leaf: np.zeros((rows, *leaf.shape[1:]), leaf.dtype),
            _extra_shapes(self.algorithms, self.block_size),
        )


def build_prefill(batch: batch_lib.ScheduleBatch, shape: BatchShape) -> PrefillInputs:
    """Packs the rows' committed tokens and pads to the bucket."""
    R, T = batch.bucket.rows, batch.bucket.tokens
    tokens = np.zeros((T,), np.int32)
    cu_q_lens = np.zeros((R + 1,), np.int32)
    context_lens, kv_lens, page_table = _row_arrays(batch, shape)
    at = 0
    for i, row in enumerate(batch.rows):
        end = row.start + row.num_tokens
        tokens[at : at + row.num_tokens] = row.request.token_ids[row.start : end]
        at += row.num_tokens
        cu_q_lens[i + 1 :] = at
    return PrefillInputs(
        tokens=tokens,
        cu_q_lens=cu_q_lens,
        context_lens=context_lens,
        kv_lens=kv_lens,
        page_table=page_table,
    )


def build_decode(batch: batch_lib.ScheduleBatch, shape: BatchShape) -> DecodeInputs:
    """Stacks the rows' in-flight blocks and options and pads to the bucket."""
    R, L = batch.bucket.rows, shape.block_size
    context_lens, kv_lens, page_table = _row_arrays(batch, shape)
    tokens = np.zeros((R, L), np.int32)
    masked, editable = np.zeros((R, L), bool), np.zeros((R, L), bool)
    step, algorithm = np.zeros((R,), np.int32), np.zeros((R,), np.int32)
    is_final, tokens_left = np.zeros((R,), bool), np.zeros((R,), np.int32)
    capacity, stop_ids = np.zeros((R,), np.int32), np.full((R, MAX_STOP_IDS), -1, np.int32)
    params = {f.name: np.zeros((R,), np.float32) for f in dataclasses.fields(interface.BlockParams)}
    params["max_post_edit_steps"] = np.zeros((R,), np.int32)
    temperature, top_p = np.zeros((R,), np.float32), np.ones((R,), np.float32)
    top_k, seed = np.zeros((R,), np.int32), np.zeros((R, 2), np.uint32)
    extra = shape.initial_extra(R)
    for i, row in enumerate(batch.rows):
        request, block = row.request, _block_of(row.request)
        tokens[i], masked[i], editable[i] = block.tokens, block.masked, block.editable
        step[i], is_final[i] = block.step, block.is_final
        tokens_left[i] = request.max_new_tokens - len(request.output_ids)
        capacity[i] = len(request.pages) * shape.page_size
        ends = request.end_token_ids[:MAX_STOP_IDS]
        stop_ids[i, : len(ends)] = ends
        dllm = request.sampling.dllm
        algorithm[i] = shape.algorithms.index(dllm.algorithm)
        _fill_params(params, i, dllm)
        temperature[i], top_p[i], top_k[i] = _sampling_of(request.sampling)
        seed[i] = (request.seed >> 32 & 0xFFFFFFFF, request.seed & 0xFFFFFFFF)
        if block.extra is not None:
            _store_extra(extra, i, block.extra)
    return DecodeInputs(
        tokens=tokens,
        masked=masked,
        editable=editable,
        context_lens=context_lens,
        kv_lens=kv_lens,
        page_table=page_table,
        step=step,
        is_final=is_final,
        tokens_left=tokens_left,
        capacity=capacity,
        stop_ids=stop_ids,
        algorithm=algorithm,
        params=interface.BlockParams(**params),
        sampling=sampling.SamplingRows(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        ),
        extra=extra,
        max_steps=np.int32(batch.max_steps),
        yields_on_finish=np.bool_(batch.yields_on_finish),
    )


@functools.cache
def _extra_shapes(algorithms: tuple[str, ...], block_size: int) -> tuple[Any, ...]:
    return jax.eval_shape(
        lambda: tuple(decoding.ALGORITHMS[name].init_extra(1, block_size) for name in algorithms)
    )


def _row_arrays(
    batch: batch_lib.ScheduleBatch, shape: BatchShape
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    R = batch.bucket.rows
    context_lens, kv_lens = np.zeros((R,), np.int32), np.zeros((R,), np.int32)
    page_table = np.zeros((R, shape.pages_per_row), np.int32)
    for i, row in enumerate(batch.rows):
        context_lens[i] = row.start
        kv_lens[i] = row.start + row.num_tokens
        page_table[i, : len(row.request.pages)] = row.request.pages
    return context_lens, kv_lens, page_table


def _block_of(request: request_lib.Request) -> request_lib.BlockRow:
    assert request.block is not None, f"decode row {request.request_id} has no block"
    return request.block


def _fill_params(params: dict[str, np.ndarray], i: int, dllm: sampling_params.DllmParams) -> None:
    options = dataclasses.asdict(dllm)
    for name, values in params.items():
        values[i] = options[name] or 0


def _sampling_of(sampling_of: sampling_params.SamplingParams) -> tuple[float, float, int]:
    """Returns (temperature, top_p, top_k); greedy when temperature is 0 or top_k is 1."""
    temperature = sampling_of.temperature or 0.0
    top_k = sampling_of.top_k or 0
    if top_k == 1:
        temperature = 0.0
    return temperature, sampling_of.top_p or 1.0, max(top_k, 0)


def _store_extra(extra: Any, i: int, row_extra: Any) -> None:
    def store(stacked: np.ndarray, value: np.ndarray) -> None:
        stacked[i] = value

    jax.tree.map(store, extra, row_extra)
