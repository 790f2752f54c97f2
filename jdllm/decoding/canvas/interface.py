"""The array interface between the canvas loop and the algorithms of full-attention models.

Such a model sees its whole sequence at once: a row is a *canvas*, the prompt and all
positions to be written, and there is no order in which blocks must become final. An
algorithm says before each forward which positions are run through the model and of which
the vocabulary statistics are wanted (`plan`), and after it what is written (`update`).
Both are pure. Structure (which rule) is in the frozen dataclass, hence in the compiled
step; every option a request may set is an `[R]` array of `CanvasParams`.

K,V of every position lie in the row's pages. A forward of positions [low, high) overwrites
theirs and attends to those of the whole canvas, so a cache mode is nothing but a choice of
windows: positions outside keep the K,V of the last forward that had them.

Letters: R rows, S positions (the longest canvas that is compiled), E end tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jdllm import algorithms

# One field per option. Its type is Any, since a type checker cannot know the fields.
_Options: Any = dataclasses.make_dataclass(
    "CanvasOptions",
    [(name, jax.Array) for name in algorithms.arrays_of(algorithms.CANVAS)],
    frozen=True,
    slots=True,
    kw_only=True,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasParams(_Options):
    """Per-row options, [R] each: those of all canvas algorithms; a rule reads what it has.

    Words are numbers here (`algorithms.word`). `steps` 0 means as many as there are positions
    to write; `factor` 0 means none. `temperature` 0 is greedy.
    """

    temperature: jax.Array  # float32
    seed: jax.Array  # [R, 2] uint32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """What each row is writing; every leaf leads with R.

    Positions [0, start) are the prompt, [start, end) what is written, of which some may be
    given (never masked), [end, length) a given text behind it (infilling), and from `length` on
    there is padding, never masked. `masked`: not written yet. `step`: forwards that the row has
    had. `end_ids`: tokens that end the output, -1 for none. `filler`: what the model's canvases
    hold behind their end, the end of text. `is_done`: nothing is left to do; such rows never
    change again. `extra` is the algorithm's own state.
    """

    tokens: jax.Array  # [R, S] int32
    masked: jax.Array  # [R, S] bool
    start: jax.Array  # [R] int32, >= 1
    end: jax.Array  # [R] int32
    length: jax.Array  # [R] int32
    step: jax.Array  # [R] int32
    end_ids: jax.Array  # [R, E] int32
    filler: jax.Array  # [R] int32
    is_done: jax.Array  # [R] bool
    params: CanvasParams
    extra: Any

    @property
    def positions(self) -> jax.Array:
        """[S] int32."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    def write(self, tokens: jax.Array, *, where: jax.Array) -> Canvas:
        """Writes `tokens` at masked positions of unfinished rows."""
        where = where & self.masked & ~self.is_done[:, None]
        return dataclasses.replace(
            self,
            tokens=jnp.where(where, tokens, self.tokens),
            masked=self.masked & ~where,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the next forward of each row does.

    Positions [low, high), of [0, length), are forwarded, none where the row is done. `wanted`:
    masked positions in the window whose proposal `update` reads. `is_full`: [0, length).
    """

    low: jax.Array  # [R] int32
    high: jax.Array  # [R] int32
    wanted: jax.Array  # [R, S] bool
    is_full: jax.Array  # [R] bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasProposal:
    """What the model suggests for the wanted positions, aligned to the position.

    The statistics are those of the logits, or of the logits / temperature if the algorithm
    `tempers`; the mask id is never proposed but stays in the normaliser. `tokens`: drawn at
    the row's temperature, the most probable at 0; `prob`: the probability of `tokens`, and
    `logprob` its logarithm. `entropy` in nats. `margin`: the two highest probabilities'
    difference. Positions that are not wanted hold their own token, probability and margin 0,
    entropy +inf.
    """

    tokens: jax.Array  # [R, S] int32
    prob: jax.Array  # [R, S] float32
    logprob: jax.Array  # [R, S] float32
    entropy: jax.Array  # [R, S] float32
    margin: jax.Array  # [R, S] float32


class CanvasAlgorithm(Protocol):
    """Implemented by frozen dataclasses: hashable, so static under jit.

    `tempers`: its proposals are statistics of logits / temperature. `guides`: it has
    `cfg_scale`, and its forwards may be twofold.
    """

    tempers: bool
    guides: bool

    def begin(self, canvas: Canvas) -> Any:
        """Returns the `extra` of canvases that have had no forward yet."""
        ...

    def plan(self, canvas: Canvas) -> tuple[Canvas, Window]:
        """Returns what the next forward does, and the canvas with what was decided for it.

        Rows with nothing left to do come back as done, with an empty window. Nothing is written
        but behind an end token.
        """
        ...

    def update(self, canvas: Canvas, proposal: CanvasProposal) -> Canvas:
        """Returns the canvas after the forward that was planned.

        `canvas.step` is still the number of forwards before it.
        """
        ...


def first_masked(canvas: Canvas) -> jax.Array:
    """Returns [R] int32: the first masked position, `end` where there is none."""
    return jnp.min(jnp.where(canvas.masked, canvas.positions, canvas.end[:, None]), axis=1).astype(
        jnp.int32
    )


def current_block(canvas: Canvas) -> jax.Array:
    """Returns [R, S] bool: the positions of the first block that has a masked one.

    Blocks of `block_length` follow the prompt; the last one may be short.
    """
    first, length = first_masked(canvas), canvas.params.block_length
    low = canvas.start + (first - canvas.start) // length * length
    high = jnp.where(first < canvas.end, jnp.minimum(low + length, canvas.end), low)
    return (canvas.positions >= low[:, None]) & (canvas.positions < high[:, None])


def is_end(canvas: Canvas) -> jax.Array:
    """Returns [R, S] bool: a written position after the prompt that holds an end token."""
    positions = canvas.positions
    inside = (positions >= canvas.start[:, None]) & (positions < canvas.end[:, None])
    ends = jnp.zeros_like(canvas.masked)
    for end_id in canvas.end_ids.T:  # few; XLA would give a reduction a kernel of its own
        ends |= canvas.tokens == end_id[:, None]
    return inside & ~canvas.masked & ends


def first_end(canvas: Canvas) -> jax.Array:
    """Returns [R] int32: the first position that holds an end token, S where there is none."""
    S = canvas.positions.shape[0]
    return jnp.min(jnp.where(is_end(canvas), canvas.positions, S), axis=1).astype(jnp.int32)


def ranks(score: jax.Array, eligible: jax.Array) -> jax.Array:
    """Returns [R, S] int32: how many eligible positions come before a position.

    Higher scores come first, of equal ones the lower position. What is not eligible gets S.
    Compares all pairs: a sort cannot run inside a loop on the device.
    """
    S = score.shape[1]
    place = jnp.arange(S, dtype=jnp.int32)
    higher = score[:, None, :] > score[:, :, None]
    earlier = (score[:, None, :] == score[:, :, None]) & (place[None, :] < place[:, None])
    before = jnp.sum(eligible[:, None, :] & (higher | earlier), axis=2, dtype=jnp.int32)
    return jnp.where(eligible, before, S)


def uniform(canvas: Canvas, salt: int) -> jax.Array:
    """Returns [R, S] float32 in [0, 1), by the row's seed, the position, its step and `salt`.

    Neither the row nor the length of the longest canvas matters.
    """

    def one(seed: jax.Array, step: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed)
        for word in (salt, step, position):
            key = jax.random.fold_in(key, word)
        return jax.random.uniform(key)

    of_row = jax.vmap(one, in_axes=(None, None, 0))
    return jax.vmap(of_row, in_axes=(0, 0, None))(canvas.params.seed, canvas.step, canvas.positions)
