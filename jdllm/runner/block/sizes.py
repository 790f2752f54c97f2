"""The sizes of a denoising step that are compiled, and which of them a step has.

Letters: R rows, C blocks that are committed in the step.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jdllm import decoding
from jdllm.runner import config as config_lib

# The fixed time of a forward, in tokens that take as long. LLaDA2.0-mini on an H200 takes 10.5 ms
# for 16 rows of 32 tokens and 15.1 ms for 64 rows: 9.0 ms, and 0.096 ms for each row.
FORWARD_TOKENS = 3072


def commit_rows(
    rows: int, config: config_lib.StepConfig, *, is_coarse: bool = False
) -> tuple[int, ...]:
    """Returns the compiled numbers C of committed blocks in a step of `rows` rows, ascending.

    `is_coarse`: as few as possible, for launches that are rare.
    """
    needs = any(decoding.BLOCK_ALGORITHMS[name].persists_apart for name in config.algorithms)
    if not config.fuses_commits or not needs:
        return (0,)
    # A small C serves rows that finish blocks at different steps, the largest C rows in lockstep.
    return (0, rows) if rows < 8 or is_coarse else (0, max(4, rows // 8), rows)


def choose_size(
    sizes: tuple[int, ...], wanted: Int32[Array, ""], *, tokens: int
) -> Int32[Array, ""]:
    """Returns the index of the size that saves the most time for `wanted` rows.

    A step of all R rows has `tokens` tokens and takes as long as `tokens + FORWARD_TOKENS`. A
    committed block saves its row one forward, which is an R-th of a step. Each of the C blocks,
    used or not, lengthens this step by the tokens of a block, an R-th of `tokens`.
    """
    used = jnp.minimum(wanted, jnp.asarray(sizes, jnp.int32))
    saved = used * (tokens + FORWARD_TOKENS) - jnp.asarray(sizes, jnp.int32) * tokens
    return jnp.argmax(saved).astype(jnp.int32)
