"""What the blocks of a launch looked like after each step, for rows that show their denoising.

Every launch carries a frame per forward of each row, whoever shows its steps: about 12 bytes a
token, 101 kB for 64 rows of 32 tokens and 4 forwards. A program of its own would compute logits for
all the rows of a launch, too. The host copies frames with the other outputs, so nobody waits for a
step, and launches are as long as those of other rows.

Letters: R rows, L tokens of a block, K forwards of a row in the launch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jdllm.runner.block.state import RowState
from jdllm.scheduler import text_frames
from jdllm.scheduler.batch import Frame
from jdllm.scheduler.request import Request


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFrames:
    """One entry per forward of a row; `step` is 0 where the forward changed no block.

    `start` is the position of the block. `is_final`: the block became final in this step. The
    arrays are traced in the launch and numpy's on the host, hence `Any`.
    """

    step: Int32[Any, "R K"]
    start: Int32[Any, "R K"]
    is_final: Bool[Any, "R K"]
    tokens: Int32[Any, "R K L"]
    masked: Bool[Any, "R K L"]
    logprobs: Float32[Any, "R K L"]


def none_yet(rows: int, forwards: int, block_size: int) -> StepFrames:
    """Returns the frames before the first step of a launch."""
    shape = (rows, forwards)
    return StepFrames(
        step=jnp.zeros(shape, jnp.int32),
        start=jnp.zeros(shape, jnp.int32),
        is_final=jnp.zeros(shape, bool),
        tokens=jnp.zeros((*shape, block_size), jnp.int32),
        masked=jnp.zeros((*shape, block_size), bool),
        logprobs=jnp.zeros((*shape, block_size), jnp.float32),
    )


def add(
    frames: StepFrames, before: RowState, after: RowState, worked: Bool[Array, " R"]
) -> StepFrames:
    """Returns the frames with those of a step that worked on the blocks of the rows `worked`.

    `after` are the rows before they move on to their next blocks.
    """
    forwards = frames.step.shape[1]
    place = worked[:, None] & (jnp.arange(forwards) == before.nfe[:, None])
    new = StepFrames(
        step=after.step[:, None],
        start=after.context_lens[:, None],
        is_final=after.is_final[:, None],
        tokens=after.tokens[:, None],
        masked=after.masked[:, None],
        logprobs=after.logprobs[:, None],
    )
    return jax.tree.map(
        lambda old, one: jnp.where(place.reshape(place.shape + (1,) * (old.ndim - 2)), one, old),
        frames,
        new,
    )


def of_row(frames: StepFrames, i: int, request: Request) -> tuple[Frame, ...]:
    """Returns the frames of row `i`, whose places are counted from the prompt's end."""
    found, block_size = [], frames.tokens.shape[2]
    prompt_len = len(request.prompt_ids)
    for k in np.nonzero(frames.step[i])[0]:
        start = int(frames.start[i, k])
        head = max(0, prompt_len - start)
        first = start + head - prompt_len
        shown = slice(head, min(block_size, head + request.max_new_tokens - first))
        tokens, masked = frames.tokens[i, k, shown], frames.masked[i, k, shown]
        frame = text_frames.TextFrame.of(
            first,
            tokens,
            frames.logprobs[i, k, shown],
            is_written=~masked,
            has_step=np.ones_like(masked),
            num_final=first + (len(tokens) if frames.is_final[i, k] else 0),
        )
        found.append(Frame(step=int(frames.step[i, k]), value=frame))
    return tuple(found)
