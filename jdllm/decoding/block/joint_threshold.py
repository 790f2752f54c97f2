"""JointThreshold: write confident masks and correct written tokens in the same step.

This is the rule of LLaDA2.1 (SGLang 0.5.23, `dllm/algorithm/joint_threshold.py`). The step that
changes nothing is also the forward that persists K,V. The budget `max_post_edit_steps` ends edits
that oscillate; it counts steps after the last mask is written. The penalty lambda is part of the
proposal (`runner/block/proposal.py`), not of the rule.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.decoding.block import interface


@dataclasses.dataclass(frozen=True, slots=True)
class JointThreshold:
    """Fills masks and edits tokens; needs at most T + max_post_edit_steps + 1 updates."""

    persists_apart = False
    forwards_parts = False

    def init_extra(self, num_rows: int, block_size: int) -> dict[str, jax.Array]:
        return {
            "post_edit_steps": jnp.zeros((num_rows,), jnp.int32),
            "drawn": jnp.zeros((num_rows, block_size), bool),
        }

    def update(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> interface.BlockState:
        """Fills masks above `threshold` (at least one) and edits tokens above `edit_threshold`.

        A row is done when it selects nothing, or when its edit budget is spent. Then it
        writes nothing, so the last forward computed the K,V of its final tokens.
        """
        active = ~block.done
        unmasked = ~jnp.any(block.masked, axis=-1)
        post_edit_steps = block.extra["post_edit_steps"] + (unmasked & active)
        is_spent = unmasked & (post_edit_steps > block.params.max_post_edit_steps)
        fill = interface.select_masked(block.masked, proposal.prob, block.params.threshold)
        # A drawn token is a sample, not a mistake: the argmax must not revert it.
        edit = (
            ~block.masked
            & block.editable
            & ~block.extra["drawn"]
            & (proposal.best_prob > block.params.edit_threshold[:, None])
            & (proposal.best != block.tokens)
        )
        selects = jnp.any(fill | edit, axis=-1)
        is_finished = is_spent | ~selects
        where = (fill | edit) & ~is_finished[:, None]
        written = block.write(jnp.where(fill, proposal.tokens, proposal.best), where=where)
        drawn = block.extra["drawn"] | (fill & where & proposal.is_drawn[:, None])
        extra = {"post_edit_steps": post_edit_steps, "drawn": drawn}
        return dataclasses.replace(written, done=block.done | is_finished, extra=extra)

    def is_final(self, block: interface.BlockState) -> Bool[Array, " B"]:
        return block.done

    def settled(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        return jnp.broadcast_to(block.done[:, None], block.masked.shape)

    def reads(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        return ~self.settled(block)

    def forwards(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        return jnp.ones_like(block.masked)
