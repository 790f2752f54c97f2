"""FastDLLM: block after block, and all positions of a block that the model is sure of at once.

The samplers of Fast-dLLM v1 for LLaDA, with its two caches. A block begins with a forward of the
whole canvas, which writes as any other does; then `prefix` forwards [block, end of the canvas)
and `dual` the block alone, and what lies outside keeps the K,V of the block's first forward. The
next block begins as soon as the block is written; the reference runs one forward more where the
first one finished it.

One rule for both families. The reference's Dream sampler writes only the first token of a block
from the full forward, since its windows lack the hidden state before them; here they have it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jdllm import algorithms
from jdllm.decoding.canvas import interface as canvas_lib
from jdllm.decoding.canvas import rules as canvas_rules

NONE = algorithms.word("FastDLLM", "cache_mode", "none")
DUAL = algorithms.word("FastDLLM", "cache_mode", "dual")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`initial`: masked before the first forward. `begun`: the last block that had its own."""

    initial: jax.Array  # [R, S] bool
    begun: jax.Array  # [R] int32, -1: none


@dataclasses.dataclass(frozen=True, slots=True)
class FastDLLM:
    """The most probable position always, others by threshold, factor or schedule."""

    tempers = False
    guides = False

    def begin(self, canvas: canvas_lib.Canvas) -> Progress:
        return Progress(initial=canvas.masked, begun=jnp.full_like(canvas.start, -1))

    def plan(self, canvas: canvas_lib.Canvas) -> tuple[canvas_lib.Canvas, canvas_lib.Window]:
        mode, block = canvas.params.cache_mode, canvas_rules.first_block(canvas)
        is_full = (mode == NONE) | (canvas.extra.begun != block)
        low = canvas_rules.block_start(canvas, block)
        high = jnp.where(mode == DUAL, canvas_rules.block_start(canvas, block + 1), canvas.length)
        planned = dataclasses.replace(canvas, extra=dataclasses.replace(canvas.extra, begun=block))
        return canvas_rules.window(
            planned,
            low=jnp.where(is_full, 0, low),
            high=jnp.where(is_full, canvas.length, high),
            wanted=canvas_lib.current_block(canvas),
        )

    def update(
        self, canvas: canvas_lib.Canvas, proposal: canvas_lib.CanvasProposal
    ) -> canvas_lib.Canvas:
        """Writes at least one position of the first block that has masked ones.

        By factor f, the n-th most probable is written if its probability is at least
        1 - f / (n + 1). That bound grows with n while the probabilities fall, so the first
        failure is the last success's successor.
        """
        params, prob = canvas.params, proposal.prob
        eligible = canvas_lib.current_block(canvas) & canvas.masked
        rank = canvas_lib.ranks(prob, eligible)  # 0 for n = 1
        factor, steps = params.factor[:, None], params.steps[:, None]
        count = canvas_rules.scheduled(canvas, canvas.extra.initial)[:, None]
        passes = jnp.where(
            factor > 0,
            prob >= 1 - factor / (rank + 2),
            jnp.where(steps > 0, rank < count, prob >= params.threshold[:, None]),
        )
        return canvas.write(proposal.tokens, where=eligible & (passes | (rank == 0)))
