"""What a canvas row is on the device: all of its positions, its algorithm's state, its window.

As in `block/state.py` the states of all running requests lie in slots and stay on the device from
launch to launch; every leaf leads with R. A row's next window is planned at the end of the step
before, when the hidden states are at hand that a shifted family needs beside it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdllm import decoding
from jdllm.decoding.canvas import interface as canvas
from jdllm.runner import config as config_lib
from jdllm.runner.canvas import inputs as inputs_lib
from jdllm.runner.launch import driver
from jdllm.runner.launch import words as words_lib
from jdllm.runner.launch.rows import select


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasState:
    """What a row carries from step to step and from launch to launch.

    `tokens` to `step`: see `canvas.Canvas`. `steps` and `logprobs` are those of a token's
    writing. `window` is that of the next forward. `edge`: the hidden state of the position
    before it, where logits are shifted. `num_settled`: end of the settled prefix. `is_finished`:
    no more forwards; `is_invalid`: because its numbers were none (NaN). The last four are those
    of a launch: forwards with the row, full ones, tokens forwarded, and where
    the settled prefix ended when it began.
    """

    tokens: jax.Array  # [R, S] int32
    masked: jax.Array  # [R, S] bool
    start: jax.Array  # [R] int32
    end: jax.Array  # [R] int32
    length: jax.Array  # [R] int32
    step: jax.Array  # [R] int32
    steps: jax.Array  # [R, S] int32
    logprobs: jax.Array  # [R, S] float32
    extra: Any  # one tree per compiled algorithm
    window: canvas.Window
    edge: jax.Array  # [R, D], or [R, 0]
    num_settled: jax.Array  # [R] int32
    is_finished: jax.Array  # [R] bool
    is_invalid: jax.Array  # [R] bool
    nfe: jax.Array  # [R] int32
    num_full: jax.Array  # [R] int32
    num_forwarded: jax.Array  # [R] int32
    settled_before: jax.Array  # [R] int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The states of all running requests between launches, N of them.

    Each is one row of words (`launch/words.py`): a launch takes and leaves them with one kernel.
    """

    words: jax.Array  # [N, W] int32: a `CanvasState` but for its edge
    edge: jax.Array  # [N, D], or [N, 0]

    def write(self, slot: jax.Array, rows: CanvasState) -> Slots:
        """Returns the slots with the rows' states in `slot` [R]; those out of range are dropped."""
        words = jax.vmap(words_lib.pack_traced)(dataclasses.replace(rows, edge=()))
        return Slots(
            words=self.words.at[slot].set(words, mode="drop"),
            edge=self.edge.at[slot].set(rows.edge, mode="drop"),
        )

    def read(self, slot: jax.Array, like: CanvasState) -> CanvasState:
        """Returns the rows' states from `slot` [R]; `like`: their shapes."""
        row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), like)
        layout = words_lib.Layout.of(dataclasses.replace(row, edge=()))
        rows = jax.vmap(layout.unpack)(self.words[slot])
        return dataclasses.replace(rows, edge=self.edge[slot])


def algorithms(config: config_lib.StepConfig) -> tuple[canvas.CanvasAlgorithm, ...]:
    """Returns the compiled algorithms, in the variant of the model's family."""
    is_shifted = config.spec.diffusion.is_shifted
    return tuple(
        decoding.canvas_algorithm(name, is_shifted=is_shifted) for name in config.algorithms
    )


def empty_slots(num_slots: int, config: config_lib.StepConfig) -> Slots:
    """Returns the states of a runner that has served nothing; their values do not matter."""
    dtype = config.pool.dtype  # hidden states have it, too
    nothing = inputs_lib.padding(
        num_slots, config.context_length, pages_per_row=1, limits=driver.shapes()
    )
    rows = jax.eval_shape(lambda inputs: _fresh(config, inputs, dtype), nothing)
    words = words_lib.Layout.of(dataclasses.replace(rows, edge=())).num_words // num_slots
    return Slots(
        words=jnp.zeros((num_slots, words), words_lib.WORD), edge=jnp.zeros(rows.edge.shape, dtype)
    )


def enter(
    config: config_lib.StepConfig,
    inputs: inputs_lib.CanvasInputs,
    slots: Slots,
    is_row: jax.Array,
) -> CanvasState:
    """Returns the rows' states at the start of a launch: from their slots, or new ones.

    Padding rows hold what the last slot does, finished and without a window: nobody reads them.
    """

    def fresh(inputs: inputs_lib.CanvasInputs) -> CanvasState:
        return _fresh(config, inputs, slots.edge.dtype)

    last = slots.words.shape[0] - 1
    kept = slots.read(jnp.minimum(inputs.slot, last), like=jax.eval_shape(fresh, inputs))

    def begin(_, rows: CanvasState) -> CanvasState:
        return select(inputs.is_fresh, fresh(inputs), rows)

    # A loop of one turn or none: most launches have no new row, and planning takes many small
    # kernels (it stays on the device where a conditional would not).
    rows = jax.lax.fori_loop(0, jnp.any(inputs.is_fresh).astype(jnp.int32), begin, kept)
    zeros = jnp.zeros_like(inputs.slot)
    return dataclasses.replace(
        rows,
        window=select(is_row, rows.window, jax.tree.map(jnp.zeros_like, rows.window)),
        is_finished=rows.is_finished | ~is_row,
        nfe=zeros,
        num_full=zeros,
        num_forwarded=zeros,
        # A new row may begin with given tokens: they count as settled by this launch.
        settled_before=jnp.where(inputs.is_fresh, inputs.start, rows.num_settled),
    )


def _fresh(
    config: config_lib.StepConfig, inputs: inputs_lib.CanvasInputs, dtype: Any
) -> CanvasState:
    """Returns rows that begin here, their first window planned."""
    ids = inputs.canvas
    R, S = ids.shape
    zeros, no = jnp.zeros((R,), jnp.int32), jnp.zeros((R,), bool)
    is_shifted = config.spec.diffusion.is_shifted
    masked = ids < 0
    state = CanvasState(
        tokens=jnp.where(masked, config.spec.diffusion.mask_token_id, ids),
        masked=masked,
        start=inputs.start,
        end=inputs.end,
        length=inputs.length,
        step=zeros,
        steps=jnp.zeros((R, S), jnp.int32),
        logprobs=jnp.zeros((R, S), jnp.float32),
        extra=(),
        window=canvas.Window(low=zeros, high=zeros, wanted=jnp.zeros((R, S), bool), is_full=no),
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
        algorithm.begin(as_canvas(config, inputs, state, None)) for algorithm in algorithms(config)
    )
    return plan(config, inputs, dataclasses.replace(state, extra=begun))


def as_canvas(
    config: config_lib.StepConfig, inputs: inputs_lib.CanvasInputs, state: CanvasState, extra: Any
) -> canvas.Canvas:
    """Returns what an algorithm sees of the rows."""
    return canvas.Canvas(
        tokens=state.tokens,
        masked=state.masked,
        start=state.start,
        end=state.end,
        length=state.length,
        step=state.step,
        end_ids=inputs.end_ids,
        filler=jnp.full_like(state.start, config.spec.diffusion.end_of_text_id),
        is_done=state.is_finished,
        params=inputs.params,
        extra=extra,
    )


def plan(
    config: config_lib.StepConfig, inputs: inputs_lib.CanvasInputs, state: CanvasState
) -> CanvasState:
    """Returns the state with the next window of every row; a row without one is finished.

    A row is finished, too, when an end token lies in its settled prefix, or nothing that is
    shown is open: what comes later is never seen.
    """
    extras, all_planned = [], []
    for algorithm, extra in zip(algorithms(config), state.extra, strict=True):
        planned, window = algorithm.plan(as_canvas(config, inputs, state, extra))
        extras.append(planned.extra)
        all_planned.append((dataclasses.replace(planned, extra=()), window))
    after, window = all_planned[0]
    for i, mine in enumerate(all_planned[1:], start=1):
        after, window = select(inputs.algorithm == i, mine, (after, window))
    settled = canvas.first_masked(after)
    # Plans write behind an end token only, so the first one is where it was.
    has_ended = canvas.first_end(as_canvas(config, inputs, state, ())) < settled
    is_finished = state.is_finished | after.is_done | has_ended | (settled >= inputs.shown)
    stays = state.is_finished
    return dataclasses.replace(
        state,
        tokens=jnp.where(stays[:, None], state.tokens, after.tokens),
        masked=jnp.where(stays[:, None], state.masked, after.masked),
        extra=select(~stays, tuple(extras), state.extra),
        num_settled=jnp.where(stays, state.num_settled, settled),
        is_finished=is_finished,
        window=select(~is_finished, window, jax.tree.map(jnp.zeros_like, window)),
    )
