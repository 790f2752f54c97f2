"""The door between host and device: a `ScheduleBatch` becomes padded numpy arrays.

Shapes depend on the bucket alone. Padding rows have `kv_len` 0 and write nowhere;
padding tokens lie past `cu_q_lens[-1]`. They travel as one vector (`packing.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jdllm import algorithms, sampling_params
from jdllm.decoding.block import interface, sampling
from jdllm.decoding.canvas import interface as canvas
from jdllm.runner.launch import interrupts
from jdllm.scheduler import batch as batch_lib

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
    """What the host knows of R rows; their blocks are on the device, in the row state of `slot`.

    A fresh row begins here: `tokens`, `context_lens` and `tokens_left` are those of its
    first block, whose leading `head_lens` tokens are the prompt's. Padding rows have a slot
    past the last. `capacity`: tokens that the row's pages hold. `stop_ids` holds up to S
    end and stop tokens, -1 for none. The launch ends after `max_steps` steps, when more than
    `max_finished` rows are finished, or when the host asks (`interrupt`).
    """

    slot: Any  # [R] int32
    is_fresh: Any  # [R] bool
    tokens: Any  # [R, L] int32
    head_lens: Any  # [R] int32
    context_lens: Any  # [R] int32
    tokens_left: Any  # [R] int32
    page_table: Any  # [R, M] int32
    capacity: Any  # [R] int32
    stop_ids: Any  # [R, S] int32
    algorithm: Any  # [R] int32, index into the compiled algorithms
    params: interface.BlockParams
    sampling: sampling.SamplingRows
    max_steps: Any  # int32 scalar
    max_finished: Any  # int32 scalar
    interrupt: interrupts.Interrupt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasInputs:
    """What the host knows of R canvas rows, whose states are on the device in `slot`.

    A fresh row begins with `canvas`: its given tokens, -1 where one is to be written, and
    anything from `length` on. See `canvas.Canvas` for `start`, `end` and `length`; positions
    from `shown` on are not wanted by anyone. Padding rows have a slot past the last.
    """

    slot: Any  # [R] int32
    is_fresh: Any  # [R] bool
    canvas: Any  # [R, S] int32
    start: Any  # [R] int32
    end: Any  # [R] int32
    length: Any  # [R] int32
    shown: Any  # [R] int32
    page_table: Any  # [R, M] int32
    end_ids: Any  # [R, E] int32, -1 for none
    algorithm: Any  # [R] int32, index into the compiled algorithms
    params: canvas.CanvasParams
    max_steps: Any  # int32 scalar
    max_finished: Any  # int32 scalar
    interrupt: interrupts.Interrupt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What, beside the bucket, fixes shapes: block and page length, pages a row, slots.

    `canvas_length`: positions of a canvas row, 0 for families that write block after block.
    """

    block_size: int
    page_size: int
    pages_per_row: int
    num_slots: int
    algorithms: tuple[str, ...]
    canvas_length: int = 0


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


def build_decode(
    batch: batch_lib.ScheduleBatch,
    shape: BatchShape,
    mask_token_id: int,
    interrupt: interrupts.Interrupt,
) -> DecodeInputs:
    """Stacks the rows' slots, first blocks and options and pads to the bucket."""
    R, L = batch.bucket.rows, shape.block_size
    context_lens, _, page_table = _row_arrays(batch, shape)
    slot, is_fresh = np.full((R,), shape.num_slots, np.int32), np.zeros((R,), bool)
    tokens = np.full((R, L), mask_token_id, np.int32)
    head_lens, tokens_left = np.zeros((R,), np.int32), np.zeros((R,), np.int32)
    capacity, stop_ids = np.zeros((R,), np.int32), np.full((R, MAX_STOP_IDS), -1, np.int32)
    algorithm = np.zeros((R,), np.int32)
    params = algorithms.padding(algorithms.BLOCK, R)
    temperature, top_p = np.zeros((R,), np.float32), np.ones((R,), np.float32)
    top_k, seed = np.zeros((R,), np.int32), np.zeros((R, 2), np.uint32)
    for i, row in enumerate(batch.rows):
        request = row.request
        slot[i], is_fresh[i] = request.slot, row.is_fresh
        if row.is_fresh:
            head = request.tokens(row.start, request.num_tokens)
            tokens[i, : len(head)], head_lens[i] = head, len(head)
            tokens_left[i] = request.max_new_tokens - len(request.output_ids)
        capacity[i] = len(request.pages) * shape.page_size
        ends = request.end_token_ids[:MAX_STOP_IDS]
        stop_ids[i, : len(ends)] = ends
        dllm = request.sampling.dllm
        algorithm[i] = shape.algorithms.index(dllm.algorithm)
        algorithms.fill(params, i, dllm.algorithm, dllm.options, row_length=L)
        temperature[i], top_p[i], top_k[i] = _sampling_of(request.sampling)
        seed[i] = _seed_words(request.seed)
    return DecodeInputs(
        slot=slot,
        is_fresh=is_fresh,
        tokens=tokens,
        head_lens=head_lens,
        context_lens=context_lens,
        tokens_left=tokens_left,
        page_table=page_table,
        capacity=capacity,
        stop_ids=stop_ids,
        algorithm=algorithm,
        params=interface.BlockParams(**params),
        sampling=sampling.SamplingRows(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        ),
        max_steps=np.int32(batch.max_steps),
        max_finished=np.int32(R if batch.max_finished is None else batch.max_finished),
        interrupt=interrupt,
    )


def build_canvas(
    batch: batch_lib.ScheduleBatch, shape: BatchShape, interrupt: interrupts.Interrupt
) -> CanvasInputs:
    """Stacks the rows' slots, canvases and options and pads to the bucket."""
    inputs = padding_canvases(
        batch.bucket.rows,
        shape.canvas_length,
        pages_per_row=shape.pages_per_row,
        interrupt=interrupt,
    )
    inputs.slot[:] = shape.num_slots
    params = {f.name: getattr(inputs.params, f.name) for f in dataclasses.fields(inputs.params)}
    for i, row in enumerate(batch.rows):
        request = row.request
        inputs.slot[i], inputs.is_fresh[i] = request.slot, row.is_fresh
        length, start = len(request.canvas_ids), len(request.prompt_ids)
        if row.is_fresh:
            inputs.canvas[i, :length] = request.canvas_ids
        inputs.start[i], inputs.end[i], inputs.length[i] = start, request.canvas_end, length
        inputs.shown[i] = start + request.max_new_tokens
        inputs.page_table[i, : len(request.pages)] = request.pages
        ends = request.end_token_ids[:MAX_STOP_IDS]
        inputs.end_ids[i, : len(ends)] = ends
        dllm = request.sampling.dllm
        inputs.algorithm[i] = shape.algorithms.index(dllm.algorithm)
        algorithms.fill(params, i, dllm.algorithm, dllm.options, row_length=shape.canvas_length)
        params["temperature"][i] = request.sampling.temperature or 0.0
        params["seed"][i] = _seed_words(request.seed)
    R = batch.bucket.rows
    return dataclasses.replace(
        inputs,
        max_steps=np.int32(batch.max_steps),
        max_finished=np.int32(R if batch.max_finished is None else batch.max_finished),
    )


def padding_canvases(
    rows: int, canvas_length: int, *, pages_per_row: int, interrupt: interrupts.Interrupt
) -> CanvasInputs:
    """Returns inputs of rows that do nothing: their canvas is one given token."""
    R = rows

    def ones() -> np.ndarray:
        return np.ones((R,), np.int32)

    def zeros() -> np.ndarray:
        return np.zeros((R,), np.int32)

    return CanvasInputs(
        slot=zeros(),
        is_fresh=np.zeros((R,), bool),
        canvas=np.zeros((R, canvas_length), np.int32),
        start=ones(),
        end=ones(),
        length=ones(),
        shown=ones(),
        page_table=np.zeros((R, pages_per_row), np.int32),
        end_ids=np.full((R, MAX_STOP_IDS), -1, np.int32),
        algorithm=zeros(),
        params=canvas.CanvasParams(
            **algorithms.padding(algorithms.CANVAS, R),
            temperature=np.zeros((R,), np.float32),
            seed=np.zeros((R, 2), np.uint32),
        ),
        max_steps=np.int32(1),
        max_finished=np.int32(R),
        interrupt=interrupt,
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


def _seed_words(seed: int) -> tuple[int, int]:
    return seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF


def _sampling_of(sampling_of: sampling_params.SamplingParams) -> tuple[float, float, int]:
    """Returns (temperature, top_p, top_k); greedy when temperature is 0 or top_k is 1."""
    temperature = sampling_of.temperature or 0.0
    top_k = sampling_of.top_k or 0
    if top_k == 1:
        temperature = 0.0
    return temperature, sampling_of.top_p or 1.0, max(top_k, 0)
