"""What the host reads after a denoise launch.

Letters: R rows, L tokens of a block, K blocks that a row can finish in the launch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jdllm.runner import logit_rows
from jdllm.runner.block.asked import AskedState
from jdllm.runner.block.frames import StepFrames
from jdllm.runner.config import StepConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBlocks:
    """The blocks of each row that became final in the launch, and the row's `nfe` at that moment.

    `top` has the lists of launches with rows that need their logits. Only causal families have
    `counts`, the number of tokens that became final. The arrays are traced in the launch and
    numpy's on the host, hence `Any`.
    """

    tokens: Int32[Any, "R K L"]
    steps: Int32[Any, "R K L"]
    logprobs: Float32[Any, "R K L"]
    nfe: Int32[Any, "R K"]
    top: logit_rows.TopTokens | None = None
    counts: Int32[Any, "R K"] | None = None

    @classmethod
    def none_yet(cls, config: StepConfig, rows: int, *, with_logits: bool) -> FinishedBlocks:
        """Returns the blocks before the first step of a launch."""
        R, K, L = rows, config.max_launch_steps, config.block_size
        return cls(
            tokens=jnp.zeros((R, K, L), jnp.int32),
            steps=jnp.zeros((R, K, L), jnp.int32),
            logprobs=jnp.zeros((R, K, L), jnp.float32),
            nfe=jnp.zeros((R, K), jnp.int32),
            top=logit_rows.no_tokens(R, K, L) if with_logits else None,
            counts=jnp.zeros((R, K), jnp.int32) if config.is_causal else None,
        )

    def with_blocks(
        self, commits: Bool[Array, " R"], num_blocks: Int32[Array, " R"], new: FinishedBlocks
    ) -> FinishedBlocks:
        """Returns these and one more block of each row that `commits`; `new` has K = 1."""
        place = commits[:, None] & (jnp.arange(self.nfe.shape[1]) == num_blocks[:, None])
        return jax.tree.map(
            lambda old, one: jnp.where(
                place.reshape(place.shape + (1,) * (old.ndim - 2)), one, old
            ),
            self,
            new,
        )


# What a launch gathers; the second is None if no row needs its logits.
Gathered = tuple[FinishedBlocks, AskedState | None, StepFrames]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenoiseOutputs:
    """What the host reads after a launch; `scheduler.batch` says what the fields mean.

    `computed_tokens` counts all forwarded tokens, padding included; `real_tokens` those of rows.
    """

    blocks: FinishedBlocks
    num_blocks: Int32[Any, " R"]
    context_lens: Int32[Any, " R"]
    nfe: Int32[Any, " R"]
    num_edited: Int32[Any, " R"]
    is_invalid: Bool[Any, " R"]
    num_steps: Int32[Any, ""]
    computed_tokens: Int32[Any, ""]
    real_tokens: Int32[Any, ""]
    frames: StepFrames
