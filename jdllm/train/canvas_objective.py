"""The objective of full-attention families: one forward of each row, prompt and canvas.

The canvas follows the prompt: it holds the answer, then end-of-text tokens. Its length differs
from step to step, because requests ask for canvases of any length. Every position up to its end
sees every other. The masks look as in decoding: they lie anywhere (LLaDA's fine-tuning, and gaps
before a given text), or they follow an order from left to right, several blocks at once. The loss
is the cross-entropy of the masked positions.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jdllm.train import objective

RISING_FRACTION = 0.5  # share of the rows not masked entirely that are masked from left to right
MAX_OPEN_BLOCKS = 3  # most blocks between the clean ones and the fully masked ones
WEIGHT_BEHIND_END = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasNoiseConfig:
    """How to cut and mask canvases; their blocks begin at the prompt's end."""

    block_size: int
    full_mask_fraction: float  # share of rows whose canvas is masked entirely
    mask_token_id: int


def add_noise(
    key: PRNGKeyArray,
    tokens: Int[Array, "B S"],
    prompt_lens: Int[Array, " B"],
    answer_ends: Int[Array, " B"],
    config: CanvasNoiseConfig,
) -> objective.NoisyBatch:
    """Returns the rows as masked canvases; L = N = S, since all positions have targets.

    The answer and its end token end at `answer_ends`; end-of-text tokens follow.
    """
    B, S = tokens.shape
    key_end, key_ratio, key_place = jax.random.split(key, 3)
    ends = draw_ends(key_end, prompt_lens, answer_ends, S, config)
    place = jnp.broadcast_to(jnp.arange(S), (B, S))
    valid = place < ends[:, None]
    first, ratio = draw_ratios(key_ratio, prompt_lens, answer_ends, S, config)
    editable = valid & (place >= first[:, None])
    # A negative score means a draw below the ratio. The lowest score is masked in any case, so that
    # every row teaches something.
    score = jnp.where(editable, jax.random.uniform(key_place, (B, S)) - ratio, 2.0)
    masked = editable & ((score < 0) | (score == jnp.min(score, axis=1, keepdims=True)))
    return objective.NoisyBatch(
        tokens=jnp.where(masked, config.mask_token_id, tokens),
        positions=place,
        valid=valid,
        visible=jnp.broadcast_to(valid[:, None, :], (B, S, S)),
        targets=tokens,
        weights=masked * _weights(valid & ~masked, answer_ends),
    )


def draw_ends(
    key: PRNGKeyArray,
    prompt_lens: Int[Array, " B"],
    answer_ends: Int[Array, " B"],
    length: int,
    config: CanvasNoiseConfig,
) -> Int[Array, " B"]:
    """Returns the ends of the canvases: each has a random number of blocks and holds the answer.

    A canvas ends at `length` at the latest. Its last block may then be short, as at the end of a
    context.
    """
    fewest = -(-(answer_ends - prompt_lens) // config.block_size)
    most = -(-(length - prompt_lens) // config.block_size)
    blocks = jax.random.randint(key, prompt_lens.shape, fewest, most + 1)
    return jnp.minimum(prompt_lens + blocks * config.block_size, length)


def draw_ratios(
    key: PRNGKeyArray,
    prompt_lens: Int[Array, " B"],
    answer_ends: Int[Array, " B"],
    length: int,
    config: CanvasNoiseConfig,
) -> tuple[Int[Array, " B"], Float[Array, "B S"]]:
    """Returns the first position that may be masked, and the mask ratio of each position after it.

    The ratio is one t ~ U(0, 1) for the whole canvas, or 1, or it rises from left to right: clean
    blocks come first, then one to three blocks with rising ratios, then fully masked blocks. S is
    `length`.
    """
    B = prompt_lens.shape[0]
    key_kind, key_block, key_count, key_ratio = jax.random.split(key, 4)
    is_full, is_rising = jax.random.uniform(key_kind, (2, B)) < jnp.array(
        [[config.full_mask_fraction], [RISING_FRACTION]]
    )
    # Decoding stops after the block that holds the end of the answer.
    blocks = -(-(answer_ends - prompt_lens) // config.block_size)
    block = jnp.where(is_rising & ~is_full, jax.random.randint(key_block, (B,), 0, blocks), 0)
    first = prompt_lens + block * config.block_size
    draws = jax.random.uniform(key_ratio, (B, MAX_OPEN_BLOCKS))
    count = jax.random.randint(key_count, (B, 1), 1, MAX_OPEN_BLOCKS + 1)
    rising = jnp.sort(jnp.where(jnp.arange(MAX_OPEN_BLOCKS) < count, draws, 1.0), axis=1)
    rising = jnp.concatenate([rising, jnp.ones((B, 1))], axis=1)
    ahead = (jnp.arange(length) - first[:, None]) // config.block_size  # of the first open block
    ratio = jnp.take_along_axis(rising, jnp.clip(ahead, 0, MAX_OPEN_BLOCKS), axis=1)
    ratio = jnp.where(is_rising[:, None], ratio, draws[:, :1])
    return first, jnp.where(is_full[:, None], 1.0, ratio)


def _weights(written: Bool[Array, "B S"], answer_ends: Int[Array, " B"]) -> Float[Array, "B S"]:
    # After a visible end token there is only end-of-text: many positions, and nothing to learn.
    # The weight depends on what the model sees. If it depended on the target, the model would
    # learn that ends are rarer than they are, wherever the end of the answer is still open.
    is_end = written & (jnp.arange(written.shape[1]) >= answer_ends[:, None] - 1)
    shown = jnp.cumsum(is_end, axis=1) > 0
    return jnp.where(shown, WEIGHT_BEHIND_END, 1.0)
