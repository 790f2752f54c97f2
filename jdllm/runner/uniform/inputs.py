"""What launches of this kind get from the host: a `ScheduleBatch` becomes padded numpy arrays.

Shapes depend on the bucket alone. The arrays are numpy's on the host and traced in the launch,
hence `Any` in their types.

Letters: R rows, T packed tokens, M pages of the longest row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int32, UInt32

from jdllm.algorithms import lookup
from jdllm.decoding.uniform import interface
from jdllm.runner import paging, row_options
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import driver, interrupts
from jdllm.scheduler.batch import ScheduleBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasInputs:
    """What the host knows of the rows; their canvases are on the device, in the state of `slot`.

    A fresh row begins a canvas behind `context_lens` encoded tokens. Padding rows have a slot past
    the last. `is_greedy`: the most probable token is "drawn". `algorithm` is an index into the
    compiled algorithms.
    """

    slot: Int32[Any, " R"]
    is_fresh: Bool[Any, " R"]
    context_lens: Int32[Any, " R"]
    page_table: Int32[Any, "R M"]
    seed: UInt32[Any, "R 2"]
    is_greedy: Bool[Any, " R"]
    algorithm: Int32[Any, " R"]
    params: interface.UniformParams
    limits: driver.LaunchLimits


def build_canvas(
    batch: ScheduleBatch,
    config: StepConfig,
    interrupt: interrupts.Interrupt,
) -> CanvasInputs:
    """Stacks the rows' slots and options and pads to the bucket."""
    R = batch.bucket.rows
    slot, is_fresh = np.full((R,), config.num_slots, np.int32), np.zeros((R,), bool)
    context_lens, algorithm = np.zeros((R,), np.int32), np.zeros((R,), np.int32)
    seed, is_greedy = np.zeros((R, 2), np.uint32), np.zeros((R,), bool)
    params = lookup.padding(lookup.UNIFORM, R)
    for i, row in enumerate(batch.rows):
        sampling = row.request.sampling
        slot[i], is_fresh[i] = row.stay.slot, row.is_fresh
        context_lens[i] = row.start
        seed[i] = row_options.seed_words(row.request.seed)
        is_greedy[i] = sampling.temperature == 0
        dllm = sampling.dllm
        algorithm[i] = config.algorithms.index(dllm.algorithm)
        lookup.fill(params, i, dllm.algorithm, dllm.options, row_length=config.block_size)
    return CanvasInputs(
        slot=slot,
        is_fresh=is_fresh,
        context_lens=context_lens,
        page_table=paging.page_table(batch, config),
        seed=seed,
        is_greedy=is_greedy,
        algorithm=algorithm,
        params=interface.UniformParams(**params),
        limits=driver.LaunchLimits.of(batch, interrupt),
    )
