"""What several canvas algorithms have in common: a row's window, the surest position, and
LLaDA's schedule of how many tokens a step writes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jdllm.decoding.canvas import interface as canvas_lib


def window(
    canvas: canvas_lib.Canvas, *, low: jax.Array, high: jax.Array, wanted: jax.Array
) -> tuple[canvas_lib.Canvas, canvas_lib.Window]:
    """Returns the canvas, done where nothing is masked, and the window of the rows that are not."""
    is_done = canvas.is_done | (canvas_lib.first_masked(canvas) >= canvas.end)
    low = jnp.where(is_done, 0, low)
    high = jnp.where(is_done, 0, high)
    return dataclasses.replace(canvas, is_done=is_done), canvas_lib.Window(
        low=low,
        high=high,
        wanted=wanted & canvas.masked & ~is_done[:, None],
        is_full=~is_done & (low == 0) & (high == canvas.length),
    )


def full_window(
    canvas: canvas_lib.Canvas, *, wanted: jax.Array
) -> tuple[canvas_lib.Canvas, canvas_lib.Window]:
    """Returns what `window` does, every forward being one of the whole canvas."""
    return window(canvas, low=jnp.zeros_like(canvas.length), high=canvas.length, wanted=wanted)


def first_block(canvas: canvas_lib.Canvas) -> jax.Array:
    """Returns [R] int32: the block of the first masked position, past all blocks if none is."""
    first = canvas_lib.first_masked(canvas)
    length = canvas.params.block_length
    none = (canvas.end - canvas.start + length - 1) // length
    return jnp.where(first < canvas.end, (first - canvas.start) // length, none)


def block_start(canvas: canvas_lib.Canvas, block: jax.Array) -> jax.Array:
    """Returns [R] int32: where block number `block` [R] begins, at most `end`."""
    return jnp.minimum(canvas.start + block * canvas.params.block_length, canvas.end)


def lowest(score: jax.Array, eligible: jax.Array) -> jax.Array:
    """Returns [R, S] bool: the eligible position with the lowest score, the first of equals."""
    # Finite, so that an infinite score comes before what is not eligible.
    score = jnp.minimum(score, jnp.finfo(score.dtype).max)
    best = jnp.argmin(jnp.where(eligible, score, jnp.inf), axis=1)
    return eligible & (jnp.arange(score.shape[1]) == best[:, None])


def scheduled(canvas: canvas_lib.Canvas, initial: jax.Array) -> jax.Array:
    """Returns [R] int32, >= 1: how many tokens LLaDA's schedule writes in this step.

    The steps of a block are the row's `steps` / number of blocks, and the m positions that it
    had to write at first (`initial` [R, S]) are spread over them, the remainder over the first
    ones. What is left tells which step it is. Without `steps` every step writes one.
    """
    block = canvas_lib.current_block(canvas)
    total = jnp.sum(block & initial, axis=1, dtype=jnp.int32)
    left = jnp.sum(block & canvas.masked, axis=1, dtype=jnp.int32)
    length = canvas.params.block_length
    num_blocks = (canvas.end - canvas.start + length - 1) // length
    steps = jnp.maximum(canvas.params.steps // jnp.maximum(num_blocks, 1), 1)
    base, remainder = total // steps, total % steps
    count = base + ((total - left) < (base + 1) * remainder)
    return jnp.where(canvas.params.steps > 0, jnp.maximum(count, 1), 1)
