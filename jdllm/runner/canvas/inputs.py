"""What canvas launches get from the host: a `ScheduleBatch` becomes padded numpy arrays.

The arrays are numpy's on the host and traced in the launch, hence `Any` in their types.

Letters: R rows, S positions of the longest canvas, M pages of the longest row, E end tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int32

from jdllm.algorithms import lookup
from jdllm.decoding.canvas.interface import CanvasParams
from jdllm.runner import logit_rows, paging, row_options
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import driver, interrupts
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.rows.canvas import CanvasStay

TO_BE_WRITTEN = -1  # in `CanvasInputs.canvas`, in place of a token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasInputs:
    """What the host knows of canvas rows; their states are on the device, in `slot`.

    A fresh row begins with `canvas`: its given tokens, -1 where one is to be written, and
    arbitrary values from `length` on. See `canvas.Canvas` for `start`, `end` and `length`. Nobody
    reads positions from `shown` on. Padding rows have a slot past the last. `end_ids` is -1 where
    there is none. `algorithm` is an index into the compiled algorithms. Launches without rows that
    need their logits have no `logits`.
    """

    slot: Int32[Any, " R"]
    is_fresh: Bool[Any, " R"]
    canvas: Int32[Any, "R S"]
    start: Int32[Any, " R"]
    end: Int32[Any, " R"]
    length: Int32[Any, " R"]
    shown: Int32[Any, " R"]
    page_table: Int32[Any, "R M"]
    end_ids: Int32[Any, "R E"]
    algorithm: Int32[Any, " R"]
    params: CanvasParams
    limits: driver.LaunchLimits
    logits: logit_rows.LogitRows | None = None


def build(
    batch: ScheduleBatch,
    config: StepConfig,
    interrupt: interrupts.Interrupt,
    *,
    with_logits: bool,
) -> CanvasInputs:
    """Stacks the rows' slots, canvases and options and pads to the bucket."""
    inputs = padding(
        batch.bucket.rows,
        config.context_length,
        pages_per_row=config.pages_per_row,
        limits=driver.LaunchLimits.of(batch, interrupt),
    )
    inputs.slot[:] = config.num_slots
    params = _padding_params(batch.bucket.rows)
    for i, row in enumerate(batch.rows):
        request = row.request
        stay = row.stay
        assert isinstance(stay, CanvasStay)  # which it was planned with
        inputs.slot[i], inputs.is_fresh[i] = stay.slot, row.is_fresh
        length, start = len(stay.canvas_ids), len(request.prompt_ids)
        if row.is_fresh:
            inputs.canvas[i, :length] = [
                TO_BE_WRITTEN if token is None else token for token in stay.canvas_ids
            ]
        inputs.start[i], inputs.end[i], inputs.length[i] = start, stay.canvas_end, length
        inputs.shown[i] = start + request.max_new_tokens
        row_options.fill_end_ids(inputs.end_ids[i], request)
        dllm = request.sampling.dllm
        inputs.algorithm[i] = config.algorithms.index(dllm.algorithm)
        lookup.fill(params, i, dllm.algorithm, dllm.options, row_length=config.context_length)
        params["temperature"][i] = request.sampling.temperature or 0.0
        params["seed"][i] = row_options.seed_words(request.seed)
    return dataclasses.replace(
        inputs,
        page_table=paging.page_table(batch, config),
        params=CanvasParams(**params),
        logits=logit_rows.build(batch, config.spec.vocab_size) if with_logits else None,
    )


def padding(
    rows: int, canvas_length: int, *, pages_per_row: int, limits: driver.LaunchLimits
) -> CanvasInputs:
    """Returns inputs of padding rows: the canvas of each is one given token."""
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
        end_ids=np.full((R, row_options.MAX_END_IDS), row_options.NO_ID, np.int32),
        algorithm=zeros(),
        params=CanvasParams(**_padding_params(R)),
        limits=limits,
    )


def _padding_params(rows: int) -> lookup.Arrays:
    return lookup.padding(lookup.CANVAS, rows) | {
        "temperature": np.zeros((rows,), np.float32),
        "seed": np.zeros((rows, 2), np.uint32),
    }
