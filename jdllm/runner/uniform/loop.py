"""The denoise launch of canvases of random tokens: many steps of R rows in one loop on the device.

A step forwards the canvas of every row that is not done, reads its logits, and lets the rule draw,
keep and renoise. A row whose canvas is done waits: the host stores the output, and an encode launch
gives it final K,V before the row begins its next canvas.

Letters: R rows, L positions of a canvas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32

from jdllm import decoding
from jdllm.decoding.uniform import interface
from jdllm.models import gemma_decoder
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import driver, program
from jdllm.runner.launch.rows import select
from jdllm.runner.uniform import forward, noise, reading
from jdllm.runner.uniform.inputs import CanvasInputs
from jdllm.runner.uniform.state import RowState, enter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasOutputs:
    """What the host reads after a launch; `tokens` are the output of rows with `is_new`.

    `real_canvases` counts the canvases forwarded for rows. The arrays are traced in the launch and
    numpy's on the host, hence `Any`.
    """

    tokens: Int32[Any, "R L"]
    steps: Int32[Any, "R L"]
    logprobs: Float32[Any, "R L"]
    is_new: Bool[Any, " R"]
    is_invalid: Bool[Any, " R"]
    nfe: Int32[Any, " R"]
    num_steps: Int32[Any, ""]
    real_canvases: Int32[Any, ""]


def denoise_launch(
    graphdef: nnx.GraphDef,
    config: StepConfig,
    params: program.Params,
    memory: program.Memory,
    inputs: CanvasInputs,
) -> tuple[program.Memory, CanvasOutputs]:
    """Returns the memory (pools, row states of all slots) and the outputs after the launch.

    The caller donates `memory`.
    """
    slots: RowState = memory["slots"]
    is_row = inputs.slot < slots.nfe.shape[0]
    begin = driver.Carry.begin(
        inputs.limits,
        memory=memory["pools"],
        rows=enter(config, inputs, slots, is_row),
        num_counts=1,
    )
    body = _Body(
        config=config, model=forward.model_of(graphdef, params), inputs=inputs, is_row=is_row
    )
    carry = driver.run(body, begin, inputs.limits, **config.loop_options)
    state: RowState = carry.rows
    slots = jax.tree.map(lambda old, new: old.at[inputs.slot].set(new, mode="drop"), slots, state)
    outputs = CanvasOutputs(
        tokens=state.canvas.best,
        steps=state.steps,
        logprobs=state.logprobs,
        is_new=state.is_new,
        is_invalid=state.is_invalid,
        nfe=state.nfe,
        num_steps=carry.num_steps,
        real_canvases=carry.counts[0],
    )
    return {"pools": carry.memory, "slots": slots}, outputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """A denoising step of all rows, which has one form."""

    config: StepConfig
    model: gemma_decoder.GemmaDecoder
    inputs: CanvasInputs
    is_row: Bool[Array, " R"]
    variants: tuple[int, ...] = (0,)

    def is_finished(self, rows: RowState) -> Bool[Array, " R"]:
        return rows.is_final & self.is_row

    def is_active(self, rows: RowState) -> Bool[Array, " R"]:
        return ~rows.is_final

    def written(self, rows: RowState) -> Array:
        return rows.canvas.tokens

    def choose(self, rows: RowState) -> Int32[Array, ""]:
        del rows
        return jnp.int32(0)

    def step(self, variant: int, carry: driver.Carry) -> driver.Carry:
        del variant
        state: RowState = carry.rows
        active = self.is_active(state)
        hidden, pools = forward.forward_canvases(
            self.config,
            self.model,
            carry.memory,
            state.canvas.tokens,
            state.expected,
            self.inputs.context_lens,
            active,
            self.inputs.page_table,
        )
        found = reading.read(
            self.model, hidden, self._temperature(state), self._keys(state), active
        )
        canvas, is_done = self._denoise(state, found)
        step = canvas.step[:, None]
        after = RowState(
            canvas=canvas,
            expected=found.expected,
            steps=jnp.where(found.best == state.canvas.best, state.steps, step),
            logprobs=found.logprob,
            is_final=is_done,
            is_invalid=jnp.any(jnp.isnan(found.logprob), axis=1),
            is_new=is_done,
            nfe=state.nfe + 1,
        )
        # A row with NaN ends; the host gives it up.
        after = dataclasses.replace(
            after, is_final=after.is_final | after.is_invalid, is_new=is_done & ~after.is_invalid
        )
        return dataclasses.replace(
            carry,
            memory=pools,
            rows=select(active, after, state),
            num_steps=carry.num_steps + 1,
            counts=(carry.counts[0] + jnp.sum(active, dtype=jnp.int32),),
        )

    def _temperature(self, state: RowState) -> Float32[Array, " R"]:
        found = jnp.ones_like(self.inputs.context_lens, jnp.float32)
        for i, name in enumerate(self.config.algorithms):
            rule = decoding.UNIFORM_ALGORITHMS[name]
            mine = rule.temperature(state.canvas.step, self.inputs.params)
            found = jnp.where(self.inputs.algorithm == i, mine, found)
        return found

    def _positions(self) -> Int32[Array, "R L"]:
        place = jnp.arange(self.config.block_size, dtype=jnp.int32)
        return self.inputs.context_lens[:, None] + place

    def _keys(self, state: RowState) -> Array:
        return noise.draw_keys(self.inputs.seed, self._positions(), state.canvas.step)

    def _denoise(
        self, state: RowState, found: reading.Reading
    ) -> tuple[interface.NoisyCanvas, Bool[Array, " R"]]:
        """Runs every compiled rule, and keeps for each row its own result."""
        inputs, vocab_size = self.inputs, self.config.spec.vocab_size
        seen = interface.Seen(
            best=found.best,
            entropy=found.entropy,
            drawn=jnp.where(inputs.is_greedy[:, None], found.best, found.drawn),
            noise=noise.uniform_tokens(
                inputs.seed, self._positions(), state.canvas.step + 1, vocab_size
            ),
        )
        kept = state.canvas, state.is_final
        for i, name in enumerate(self.config.algorithms):
            updated = decoding.UNIFORM_ALGORITHMS[name].denoise(state.canvas, seen, inputs.params)
            kept = select(inputs.algorithm == i, updated, kept)
        return kept
