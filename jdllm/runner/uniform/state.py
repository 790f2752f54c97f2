"""The state of a row on the device: its canvas, and what the last step expected.

The states of all running requests lie in slots and stay on the device from launch to launch.

Letters: R rows, L positions of a canvas.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jdllm.decoding.uniform import interface
from jdllm.runner.config import StepConfig
from jdllm.runner.launch.rows import select
from jdllm.runner.uniform import noise
from jdllm.runner.uniform.inputs import CanvasInputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What a row carries from step to step and from launch to launch; every leaf leads with R.

    `canvas.best` are the tokens of the output. `steps` and `logprobs` describe them: since which
    step of the canvas, counted from 1, a position has had its token, and with which log-probability
    in the last step. `is_final`: the canvas is done, and the row waits for the host, which has its
    output encoded. `is_new`: it became so in this launch. The last two count within one launch.
    """

    canvas: interface.NoisyCanvas
    expected: Float[Array, "R L D"]
    steps: Int32[Array, "R L"]
    logprobs: Float32[Array, "R L"]
    is_final: Bool[Array, " R"]
    is_invalid: Bool[Array, " R"]
    is_new: Bool[Array, " R"]
    nfe: Int32[Array, " R"]


def empty_slots(num_slots: int, config: StepConfig) -> RowState:
    """Returns states of fresh canvases, without tokens; nobody reads those in the slots."""
    L, D = config.block_size, config.spec.hidden_size
    # A new array for each leaf, since each is donated.
    return RowState(
        canvas=interface.NoisyCanvas(
            tokens=jnp.zeros((num_slots, L), jnp.int32),
            best=jnp.full((num_slots, L), -1, jnp.int32),
            same_steps=jnp.zeros((num_slots,), jnp.int32),
            step=jnp.zeros((num_slots,), jnp.int32),
        ),
        expected=jnp.zeros((num_slots, L, D), config.pool.dtype),
        steps=jnp.zeros((num_slots, L), jnp.int32),
        logprobs=jnp.zeros((num_slots, L), jnp.float32),
        is_final=jnp.zeros((num_slots,), bool),
        is_invalid=jnp.zeros((num_slots,), bool),
        is_new=jnp.zeros((num_slots,), bool),
        nfe=jnp.zeros((num_slots,), jnp.int32),
    )


def enter(
    config: StepConfig,
    inputs: CanvasInputs,
    slots: RowState,
    is_row: Bool[Array, " R"],
) -> RowState:
    """Returns the rows' states at the start of a launch: those of their slots, or new canvases."""
    R = inputs.slot.shape[0]
    last = slots.nfe.shape[0] - 1
    kept = jax.tree.map(lambda leaf: leaf[jnp.minimum(inputs.slot, last)], slots)
    positions = inputs.context_lens[:, None] + jnp.arange(config.block_size, dtype=jnp.int32)
    fresh = empty_slots(R, config)
    tokens = noise.uniform_tokens(
        inputs.seed, positions, jnp.zeros_like(inputs.slot), config.spec.vocab_size
    )
    fresh = dataclasses.replace(
        fresh, canvas=dataclasses.replace(fresh.canvas, tokens=tokens), is_final=~is_row
    )
    return dataclasses.replace(
        select(is_row & ~inputs.is_fresh, kept, fresh),
        is_new=jnp.zeros_like(is_row),
        nfe=jnp.zeros_like(inputs.slot),
    )
