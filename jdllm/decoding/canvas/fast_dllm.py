"""FastDLLM: block after block, a step writes all positions of a block that the model is sure of.

These are the samplers of Fast-dLLM v1 for LLaDA, with its two caches. A block begins with a
forward of the whole canvas, which writes tokens like any other forward. After it, `prefix`
forwards [block, end of the canvas) and `dual` forwards the block alone. Positions outside keep
the K,V of the block's first forward. The next block begins as soon as the block is written; if
the first forward finishes the block, the reference runs one more forward.

Both families share one rule. The reference's Dream sampler writes only the first token of a block
after the full forward, because its windows lack the hidden state before them. Here they have it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jdllm.algorithms import lookup
from jdllm.decoding import order
from jdllm.decoding.canvas import interface, rules
from jdllm.decoding.canvas.interface import Canvas, CanvasProposal, Window

NONE = lookup.word("FastDLLM", "cache_mode", "none")
DUAL = lookup.word("FastDLLM", "cache_mode", "dual")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of each row.

    `initial`: masked before the first forward. `begun`: the last block that has had its first
    forward, or -1.
    """

    initial: Bool[Array, "R S"]
    begun: Int32[Array, " R"]


@dataclasses.dataclass(frozen=True, slots=True)
class FastDLLM:
    """Writes the most probable position, and others by threshold, factor or schedule."""

    tempers = False
    guides = False

    def begin(self, canvas: Canvas) -> Progress:
        return Progress(initial=canvas.masked, begun=jnp.full_like(canvas.start, -1))

    def plan(self, canvas: Canvas) -> tuple[Canvas, Window]:
        mode, block = canvas.params.cache_mode, rules.first_block(canvas)
        is_full = (mode == NONE) | (canvas.extra.begun != block)
        low = rules.block_start(canvas, block)
        high = jnp.where(mode == DUAL, rules.block_start(canvas, block + 1), canvas.length)
        planned = dataclasses.replace(canvas, extra=dataclasses.replace(canvas.extra, begun=block))
        return rules.window(
            planned,
            low=jnp.where(is_full, 0, low),
            high=jnp.where(is_full, canvas.length, high),
            wanted=interface.current_block(canvas),
        )

    def update(self, canvas: Canvas, proposal: CanvasProposal) -> Canvas:
        """Writes at least one position of the first block with masked positions.

        With factor f, the n-th most probable position is written if its probability is at least
        1 - f / (n + 1). This bound grows with n while the probabilities fall, so no position
        passes after the first one that fails.
        """
        params, prob = canvas.params, proposal.prob
        eligible = interface.current_block(canvas) & canvas.masked
        rank = order.ranks(prob, eligible)  # 0 for n = 1
        factor, steps = params.factor[:, None], params.steps[:, None]
        count = rules.scheduled(canvas, canvas.extra.initial)[:, None]
        passes = jnp.where(
            factor > 0,
            prob >= 1 - factor / (rank + 2),
            jnp.where(steps > 0, rank < count, prob >= params.threshold[:, None]),
        )
        return canvas.write(proposal.tokens, where=eligible & (passes | (rank == 0)))
