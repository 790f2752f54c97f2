"""The array interface between the canvas loop and the algorithms of full-attention models.

A full-attention model sees its whole sequence at once. A row is a *canvas*: the prompt and all
positions to write. Its blocks may become final in any order. Before each forward, an algorithm
says which positions go through the model, and for which positions it needs the vocabulary
statistics (`plan`). After the forward, it says what is written (`update`). Both are pure. The
frozen dataclass holds the structure (which rule), so the structure is part of the compiled step.
Every option of a request is an `[R]` array of `CanvasParams`.

The row's pages hold K,V of every position. A forward of positions [low, high) overwrites the K,V
of these positions and attends to the K,V of the whole canvas. So a cache mode is just a choice of
windows: a position outside the window keeps the K,V of the last forward that included it.

Letters: R rows, S positions (the longest compiled canvas), E end tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt32

from jdllm.algorithms import lookup

# One field per option. Its type is Any, since a type checker cannot know the fields.
_Options: Any = dataclasses.make_dataclass(
    "CanvasOptions",
    [(name, jax.Array) for name in lookup.arrays_of(lookup.CANVAS)],
    frozen=True,
    slots=True,
    kw_only=True,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasParams(_Options):
    """The options of all canvas algorithms, [R] each; a rule reads only its own.

    Words are numbers here (`algorithms.word`). `steps` 0 means one step per position to write;
    `factor` 0 means that it is not set. `temperature` 0 is greedy.
    """

    temperature: Float32[Array, " R"]
    seed: UInt32[Array, "R 2"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """The canvas that each row writes; the first axis of every leaf is R.

    Positions [0, start) hold the prompt. The algorithm writes [start, end), where some positions
    may hold given tokens (never masked). [end, length) holds a given text after the output
    (infilling). Positions from `length` on are padding, never masked. `masked`: not written yet.
    `step`: number of forwards of the row so far. `end_ids`: tokens that end the output, -1 for
    none. `filler`: the token that fills the model's canvases after the end of the output, the end
    of text. `is_done`: nothing is left to do, and the row never changes again. `extra`: the
    algorithm's own state.
    """

    tokens: Int32[Array, "R S"]
    masked: Bool[Array, "R S"]
    start: Int32[Array, " R"]  # >= 1
    end: Int32[Array, " R"]
    length: Int32[Array, " R"]
    step: Int32[Array, " R"]
    end_ids: Int32[Array, "R E"]
    filler: Int32[Array, " R"]
    is_done: Bool[Array, " R"]
    params: CanvasParams
    extra: Any

    @property
    def positions(self) -> Int32[Array, " S"]:
        """The positions 0 to S - 1."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    def write(self, tokens: Int[Array, "R S"], *, where: Bool[Array, "R S"]) -> Canvas:
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

    It forwards the positions [low, high) of [0, length), or none if the row is done. `wanted`:
    the masked positions in the window whose proposal `update` reads. `is_full`: the window is
    [0, length).
    """

    low: Int32[Array, " R"]
    high: Int32[Array, " R"]
    wanted: Bool[Array, "R S"]
    is_full: Bool[Array, " R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasProposal:
    """What the model suggests for the wanted positions, aligned to the position.

    The statistics are those of the logits, or of logits / temperature if the algorithm `tempers`.
    The mask id is never proposed but stays in the normaliser. `tokens`: drawn at the row's
    temperature, or the most probable at temperature 0. `prob`: the probability of `tokens`;
    `logprob`: its logarithm. `entropy` is in nats. `margin`: the difference of the two highest
    probabilities. Positions that are not wanted hold their own token, probability and margin 0,
    and entropy +inf.
    """

    tokens: Int32[Array, "R S"]
    prob: Float32[Array, "R S"]
    logprob: Float32[Array, "R S"]
    entropy: Float32[Array, "R S"]
    margin: Float32[Array, "R S"]


@runtime_checkable
class CanvasAlgorithm(Protocol):
    """A rule; frozen dataclasses implement it, so it is hashable and static under jit.

    `tempers`: its proposals are statistics of logits / temperature. `guides`: it has the option
    `cfg_scale`, so one step may need two forwards.
    """

    tempers: bool
    guides: bool

    def begin(self, canvas: Canvas) -> Any:
        """Returns the `extra` of canvases before their first forward."""
        ...

    def plan(self, canvas: Canvas) -> tuple[Canvas, Window]:
        """Returns the canvas with the decisions for the next forward, and the window of it.

        A row with nothing left to do comes back as done, with an empty window. The plan writes
        nothing, except after an end token.
        """
        ...

    def update(self, canvas: Canvas, proposal: CanvasProposal) -> Canvas:
        """Returns the canvas after the planned forward.

        `canvas.step` does not count this forward yet.
        """
        ...


def first_masked(canvas: Canvas) -> Int32[Array, " R"]:
    """Returns the first masked position, or `end` if there is none."""
    return jnp.min(jnp.where(canvas.masked, canvas.positions, canvas.end[:, None]), axis=1).astype(
        jnp.int32
    )


def current_block(canvas: Canvas) -> Bool[Array, "R S"]:
    """Returns the positions of the first block with a masked position.

    Blocks of `block_length` positions follow the prompt; the last one may be short.
    """
    first, length = first_masked(canvas), canvas.params.block_length
    low = canvas.start + (first - canvas.start) // length * length
    high = jnp.where(first < canvas.end, jnp.minimum(low + length, canvas.end), low)
    return (canvas.positions >= low[:, None]) & (canvas.positions < high[:, None])


def is_end(canvas: Canvas) -> Bool[Array, "R S"]:
    """Returns the written positions after the prompt that hold an end token."""
    positions = canvas.positions
    inside = (positions >= canvas.start[:, None]) & (positions < canvas.end[:, None])
    ends = jnp.zeros_like(canvas.masked)
    for end_id in canvas.end_ids.T:  # a few ids; XLA would make a separate kernel of a reduction
        ends |= canvas.tokens == end_id[:, None]
    return inside & ~canvas.masked & ends


def first_end(canvas: Canvas) -> Int32[Array, " R"]:
    """Returns the first position with an end token, or S if there is none."""
    S = canvas.positions.shape[0]
    return jnp.min(jnp.where(is_end(canvas), canvas.positions, S), axis=1).astype(jnp.int32)


def uniform(canvas: Canvas, salt: int) -> Float32[Array, "R S"]:
    """Returns numbers in [0, 1) that depend on the row's seed and step, the position and `salt`.

    They do not depend on the number of the row or on the length of the longest canvas.
    """

    def one(seed: jax.Array, step: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed)
        for word in (salt, step, position):
            key = jax.random.fold_in(key, word)
        return jax.random.uniform(key)

    of_row = jax.vmap(one, in_axes=(None, None, 0))
    return jax.vmap(of_row, in_axes=(0, 0, None))(canvas.params.seed, canvas.step, canvas.positions)
