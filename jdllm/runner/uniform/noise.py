"""Random numbers of a row: functions of its seed, the absolute position and the step alone.

So they depend on no other row and on no bucket, and a row that was preempted begins its canvas
again with the same tokens. Each position and step has two streams, one for the draw of a token and
one for a uniform token, whether they are used or not.

Letters: R rows, L positions of a canvas.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

_DRAW, _NOISE = 0, 1


def draw_keys(
    seed: UInt32[Array, "R 2"], positions: Int32[Array, "R L"], step: Int32[Array, " R"]
) -> UInt32[Array, "R L 2"]:
    """Returns what `pallas_kernels.logits_stats` draws by in the step after `step` steps."""
    return jax.random.key_data(_keys(seed, positions, step, _DRAW))


def uniform_tokens(
    seed: UInt32[Array, "R 2"],
    positions: Int32[Array, "R L"],
    step: Int32[Array, " R"],
    vocab_size: int,
) -> Int32[Array, "R L"]:
    """Returns random tokens for a canvas after `step` steps; 0 steps are its beginning."""
    keys = _keys(seed, positions, step, _NOISE)
    draw = jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), 0, vocab_size, jnp.int32)))
    return draw(keys)


def _keys(seed: Array, positions: Array, step: Array, stream: int) -> Array:
    def one(seed: Array, position: Array, step: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), position)
        return jax.random.fold_in(jax.random.fold_in(key, step), stream)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0, None)))(seed, positions, step)
