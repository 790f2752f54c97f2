"""What several canvas algorithms share: a row's window, the position of the lowest score, and
LLaDA's schedule of how many tokens a step writes.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from jdllm.decoding.canvas import interface
from jdllm.decoding.canvas.interface import Canvas, Window


def window(
    canvas: Canvas,
    *,
    low: Int[Array, " R"],
    high: Int[Array, " R"],
    wanted: Bool[Array, "R S"],
) -> tuple[Canvas, Window]:
    """Returns the canvas and its window; rows without masks become done, with an empty window."""
    is_done = canvas.is_done | (interface.first_masked(canvas) >= canvas.end)
    low = jnp.where(is_done, 0, low)
    high = jnp.where(is_done, 0, high)
    return dataclasses.replace(canvas, is_done=is_done), Window(
        low=low,
        high=high,
        wanted=wanted & canvas.masked & ~is_done[:, None],
        is_full=~is_done & (low == 0) & (high == canvas.length),
    )


def full_window(canvas: Canvas, *, wanted: Bool[Array, "R S"]) -> tuple[Canvas, Window]:
    """Returns what `window` returns for a forward of the whole canvas."""
    return window(canvas, low=jnp.zeros_like(canvas.length), high=canvas.length, wanted=wanted)


def first_block(canvas: Canvas) -> Int32[Array, " R"]:
    """Returns the number of the block with the first masked position.

    Without a masked position that is the number of blocks.
    """
    first = interface.first_masked(canvas)
    length = canvas.params.block_length
    none = (canvas.end - canvas.start + length - 1) // length
    return jnp.where(first < canvas.end, (first - canvas.start) // length, none)


def block_start(canvas: Canvas, block: Int[Array, " R"]) -> Int32[Array, " R"]:
    """Returns where block number `block` begins, at most `end`."""
    return jnp.minimum(canvas.start + block * canvas.params.block_length, canvas.end)


def lowest(score: Float[Array, "R S"], eligible: Bool[Array, "R S"]) -> Bool[Array, "R S"]:
    """Returns the eligible position with the lowest score, the lowest position on a tie."""
    # Finite, so that an eligible position with an infinite score comes before all others.
    score = jnp.minimum(score, jnp.finfo(score.dtype).max)
    best = jnp.argmin(jnp.where(eligible, score, jnp.inf), axis=1)
    return eligible & (jnp.arange(score.shape[1]) == best[:, None])


def scheduled(canvas: Canvas, initial: Bool[Array, "R S"]) -> Int32[Array, " R"]:
    """Returns how many tokens LLaDA's schedule writes in this step, at least 1.

    A block has `steps` / number of blocks steps. They share the positions that the block had to
    write at first (`initial`) evenly; the first steps take the remainder. The number of masks
    that are left tells which step it is. Without `steps`, every step writes one token.
    """
    block = interface.current_block(canvas)
    total = jnp.sum(block & initial, axis=1, dtype=jnp.int32)
    left = jnp.sum(block & canvas.masked, axis=1, dtype=jnp.int32)
    length = canvas.params.block_length
    num_blocks = (canvas.end - canvas.start + length - 1) // length
    steps = jnp.maximum(canvas.params.steps // jnp.maximum(num_blocks, 1), 1)
    base, remainder = total // steps, total % steps
    count = base + ((total - left) < (base + 1) * remainder)
    return jnp.where(canvas.params.steps > 0, jnp.maximum(count, 1), 1)
