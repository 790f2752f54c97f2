"""What the host reads after a denoise launch.

Letters: R rows, L tokens of a block, K blocks that a row can finish in the launch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Bool, Float32, Int32

from jdllm.runner import logit_rows
from jdllm.runner.block import frames as frames_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBlocks:
    """The blocks of each row that became final in the launch, and the row's `nfe` at that moment.

    `top` has the lists of launches with rows that need their logits. The arrays are traced in the
    launch and numpy's on the host, hence `Any`.
    """

    tokens: Int32[Any, "R K L"]
    steps: Int32[Any, "R K L"]
    logprobs: Float32[Any, "R K L"]
    nfe: Int32[Any, "R K"]
    top: logit_rows.TopTokens | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenoiseOutputs:
    """What the host reads after a launch; `scheduler.batch` says what the fields mean.

    `computed_tokens` counts all forwarded tokens, padding included; `real_tokens` those of rows.
    Only launches for rows that need their logits or show their steps have `frames`.
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
    frames: frames_lib.StepFrames | None = None
