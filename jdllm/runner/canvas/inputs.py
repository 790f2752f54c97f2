"""What canvas launches get from the host: a `ScheduleBatch` becomes padded numpy arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jdllm import algorithms
from jdllm.decoding.canvas import interface as canvas
from jdllm.runner import config as config_lib
from jdllm.runner import row_options
from jdllm.runner.launch import driver, interrupts
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler.rows import canvas as canvas_rows

TO_BE_WRITTEN = -1  # among the tokens of a canvas, on its way to the device


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
    limits: driver.LaunchLimits


def build(
    batch: batch_lib.ScheduleBatch,
    config: config_lib.StepConfig,
    interrupt: interrupts.Interrupt,
) -> CanvasInputs:
    """Stacks the rows' slots, canvases and options and pads to the bucket."""
    inputs = padding(
        batch.bucket.rows,
        config.context_length,
        pages_per_row=config.pages_per_row,
        limits=driver.LaunchLimits.of(batch, interrupt),
    )
    inputs.slot[:] = config.num_slots
    params = {f.name: getattr(inputs.params, f.name) for f in dataclasses.fields(inputs.params)}
    for i, row in enumerate(batch.rows):
        request = row.request
        stay = row.stay
        assert isinstance(stay, canvas_rows.CanvasStay)
        inputs.slot[i], inputs.is_fresh[i] = stay.slot, row.is_fresh
        length, start = len(stay.canvas_ids), len(request.prompt_ids)
        if row.is_fresh:
            inputs.canvas[i, :length] = [
                TO_BE_WRITTEN if token is None else token for token in stay.canvas_ids
            ]
        inputs.start[i], inputs.end[i], inputs.length[i] = start, stay.canvas_end, length
        inputs.shown[i] = start + request.max_new_tokens
        inputs.page_table[i, : len(stay.pages)] = stay.pages
        row_options.fill_end_ids(inputs.end_ids[i], request)
        dllm = request.sampling.dllm
        inputs.algorithm[i] = config.algorithms.index(dllm.algorithm)
        algorithms.fill(params, i, dllm.algorithm, dllm.options, row_length=config.context_length)
        params["temperature"][i] = request.sampling.temperature or 0.0
        params["seed"][i] = row_options.seed_words(request.seed)
    return inputs


def padding(
    rows: int, canvas_length: int, *, pages_per_row: int, limits: driver.LaunchLimits
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
        end_ids=np.full((R, row_options.MAX_END_IDS), row_options.NO_ID, np.int32),
        algorithm=zeros(),
        params=canvas.CanvasParams(
            **algorithms.padding(algorithms.CANVAS, R),
            temperature=np.zeros((R,), np.float32),
            seed=np.zeros((R, 2), np.uint32),
        ),
        limits=limits,
    )
