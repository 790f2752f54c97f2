"""The state of a canvas row on the device: all of its positions, its algorithm's state, its window.

As in `block/state.py` the states of all running requests lie in slots and stay on the device from
launch to launch. Every step plans the next window of each row at its end, while the hidden states
still exist: a shifted family must keep the one before the window.

Letters: R rows, S positions of the longest canvas, N slots, W words.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jdllm import decoding
from jdllm.decoding.canvas import interface
from jdllm.decoding.canvas.interface import Canvas, CanvasAlgorithm, Window
from jdllm.runner.canvas import inputs as inputs_lib
from jdllm.runner.canvas.inputs import CanvasInputs
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import driver
from jdllm.runner.launch.rows import select
from jdllm.runner.launch.words import WORD, Layout, pack_traced


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasState:
    """What a row carries from step to step and from launch to launch; every leaf leads with R.

    `tokens` to `step`: see `canvas.Canvas`. `steps` and `logprobs` say at which step a token was
    written, and with which log-probability. `extra` has one tree for each compiled algorithm.
    `window` is that of the next forward. `edge` is the hidden state of the position before the
    window where logits are shifted, else [R, 0]. `num_settled` is the end of the settled prefix.
    `is_finished`: the row has no more forwards. `is_invalid`: it ended because of NaN. The last
    four fields belong to one launch: forwards with the row, those of its whole canvas, tokens
    forwarded, and the end of the settled prefix when the launch began.
    """

    tokens: Int32[Array, "R S"]
    masked: Bool[Array, "R S"]
    start: Int32[Array, " R"]
    end: Int32[Array, " R"]
    length: Int32[Array, " R"]
    step: Int32[Array, " R"]
    steps: Int32[Array, "R S"]
    logprobs: Float32[Array, "R S"]
    extra: Any
    window: Window
    edge: Float[Array, "R D"]
    num_settled: Int32[Array, " R"]
    is_finished: Bool[Array, " R"]
    is_invalid: Bool[Array, " R"]
    nfe: Int32[Array, " R"]
    num_full: Int32[Array, " R"]
    num_forwarded: Int32[Array, " R"]
    settled_before: Int32[Array, " R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The states of all running requests between launches.

    The state of a row without its edge is one row of words (`launch/words.py`), so that a launch
    reads all states with one kernel and writes them with one. `edge` is as in `CanvasState`.
    """

    words: Int32[Array, "N W"]
    edge: Float[Array, "N D"]

    def write(self, slot: Int32[Array, " R"], rows: CanvasState) -> Slots:
        """Returns the slots with the rows' states in `slot`; slots out of range are dropped."""
        words = jax.vmap(pack_traced)(dataclasses.replace(rows, edge=()))
        return Slots(
            words=self.words.at[slot].set(words, mode="drop"),
            edge=self.edge.at[slot].set(rows.edge, mode="drop"),
        )

    def read(self, slot: Int32[Array, " R"], like: CanvasState) -> CanvasState:
        """Returns the rows' states from `slot`; `like` has their shapes."""
        row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), like)
        layout = Layout.of(dataclasses.replace(row, edge=()))
        rows = jax.vmap(layout.unpack)(self.words[slot])
        return dataclasses.replace(rows, edge=self.edge[slot])


def algorithms(config: StepConfig) -> tuple[CanvasAlgorithm, ...]:
    """Returns the compiled algorithms, in the variants for the model's family."""
    is_shifted = config.spec.diffusion.is_shifted
    return tuple(
        decoding.canvas_algorithm(name, is_shifted=is_shifted) for name in config.algorithms
    )


def empty_slots(num_slots: int, config: StepConfig) -> Slots:
    """Returns row states before the first launch; nobody reads their values."""
    dtype = config.pool.dtype  # also that of hidden states
    padding = inputs_lib.padding(
        num_slots, config.context_length, pages_per_row=1, limits=driver.shapes()
    )
    rows = jax.eval_shape(lambda inputs: _fresh(config, inputs, dtype), padding)
    words = Layout.of(dataclasses.replace(rows, edge=())).num_words // num_slots
    return Slots(words=jnp.zeros((num_slots, words), WORD), edge=jnp.zeros(rows.edge.shape, dtype))


def enter(
    config: StepConfig,
    inputs: CanvasInputs,
    slots: Slots,
    is_row: Bool[Array, " R"],
) -> CanvasState:
    """Returns the rows' states at the start of a launch: those of their slots, or new ones.

    Padding rows get a copy of the last slot, finished and without a window; nobody reads them.
    """

    def fresh(inputs: CanvasInputs) -> CanvasState:
        return _fresh(config, inputs, slots.edge.dtype)

    last = slots.words.shape[0] - 1
    kept = slots.read(jnp.minimum(inputs.slot, last), like=jax.eval_shape(fresh, inputs))

    def begin(_, rows: CanvasState) -> CanvasState:
        return select(inputs.is_fresh, fresh(inputs), rows)

    # A loop with one turn or none: most launches have no new row, and planning takes many small
    # kernels. The loop stays on the device, and a conditional would not.
    rows = jax.lax.fori_loop(0, jnp.any(inputs.is_fresh).astype(jnp.int32), begin, kept)
    zeros = jnp.zeros_like(inputs.slot)
    return dataclasses.replace(
        rows,
        window=select(is_row, rows.window, jax.tree.map(jnp.zeros_like, rows.window)),
        is_finished=rows.is_finished | ~is_row,
        nfe=zeros,
        num_full=zeros,
        num_forwarded=zeros,
        # A new row may begin with given tokens, which count as settled by this launch.
        settled_before=jnp.where(inputs.is_fresh, inputs.start, rows.num_settled),
    )


def _fresh(config: StepConfig, inputs: CanvasInputs, dtype: Any) -> CanvasState:
    """Returns the states of rows that begin with this launch, with their first window planned."""
    ids = inputs.canvas
    R, S = ids.shape
    zeros, no = jnp.zeros((R,), jnp.int32), jnp.zeros((R,), bool)
    is_shifted = config.spec.diffusion.is_shifted
    masked = ids < 0
    state = CanvasState(
        tokens=jnp.where(masked, config.mask_token_id, ids),
        masked=masked,
        start=inputs.start,
        end=inputs.end,
        length=inputs.length,
        step=zeros,
        steps=jnp.zeros((R, S), jnp.int32),
        logprobs=jnp.zeros((R, S), jnp.float32),
        extra=(),
        window=Window(low=zeros, high=zeros, wanted=jnp.zeros((R, S), bool), is_full=no),
        edge=jnp.zeros((R, config.spec.hidden_size if is_shifted else 0), dtype),
        num_settled=inputs.start,
        is_finished=no,
        is_invalid=no,
        nfe=zeros,
        num_full=zeros,
        num_forwarded=zeros,
        settled_before=zeros,
    )
    begun = tuple(
        algorithm.begin(as_canvas(config, inputs, state, ())) for algorithm in algorithms(config)
    )
    return plan(config, inputs, dataclasses.replace(state, extra=begun))


def as_canvas(config: StepConfig, inputs: CanvasInputs, state: CanvasState, extra: Any) -> Canvas:
    """Returns what an algorithm sees of the rows."""
    end_of_text_id = config.spec.diffusion.end_of_text_id
    assert end_of_text_id is not None, "every parsed config has an end of text"
    return Canvas(
        tokens=state.tokens,
        masked=state.masked,
        start=state.start,
        end=state.end,
        length=state.length,
        step=state.step,
        end_ids=inputs.end_ids,
        filler=jnp.full_like(state.start, end_of_text_id),
        is_done=state.is_finished,
        params=inputs.params,
        extra=extra,
    )


def plan(config: StepConfig, inputs: CanvasInputs, state: CanvasState) -> CanvasState:
    """Returns the state with the next window of every row; a row without a window is finished.

    A row is also finished when its settled prefix holds an end token or reaches all shown
    positions: nobody sees what comes later.
    """
    extras, all_planned = [], []
    for algorithm, extra in zip(algorithms(config), state.extra, strict=True):
        planned, window = algorithm.plan(as_canvas(config, inputs, state, extra))
        extras.append(planned.extra)
        all_planned.append((dataclasses.replace(planned, extra=()), window))
    after, window = all_planned[0]
    for i, mine in enumerate(all_planned[1:], start=1):
        after, window = select(inputs.algorithm == i, mine, (after, window))
    settled = interface.first_masked(after)
    # Plans write only behind an end token, so the first end token stays where it was.
    has_ended = interface.first_end(as_canvas(config, inputs, state, ())) < settled
    is_finished = state.is_finished | after.is_done | has_ended | (settled >= inputs.shown)
    was_finished = state.is_finished
    return dataclasses.replace(
        state,
        tokens=jnp.where(was_finished[:, None], state.tokens, after.tokens),
        masked=jnp.where(was_finished[:, None], state.masked, after.masked),
        extra=select(~was_finished, tuple(extras), state.extra),
        num_settled=jnp.where(was_finished, state.num_settled, settled),
        is_finished=is_finished,
        window=select(~is_finished, window, jax.tree.map(jnp.zeros_like, window)),
    )
