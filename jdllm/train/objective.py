"""The objective of block-causal families, all blocks of a sequence in one forward.

A row is the clean sequence followed by masked copies of its answer blocks. A masked
block sees itself and the clean blocks before it; a clean block sees clean blocks up to
itself. A block sees exactly the same when it is decoded: finished blocks before
it, its own unfinished state, and nothing after. The loss is the cross-entropy of the
masked answer positions; prompt positions are never masked.

Letters: B rows, S clean positions, C copies, L positions of the input, N positions with targets.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PRNGKeyArray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """How answer blocks are masked; a row has masked copies of `answer_blocks` blocks."""

    block_size: int
    answer_blocks: int
    copies: int
    full_mask_fraction: float
    mask_token_id: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuestionTargets:
    """Positions of the model's input whose clean tokens it must guess, too; K per row."""

    places: Int[Array, "B K"]
    tokens: Int[Array, "B K"]
    weights: Float[Array, "B K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoisyBatch:
    """The model's input [B, L] and the targets of its last positions.

    Here L = S + copies * answer_blocks * block_size, and the masked copies have targets.
    """

    tokens: Int32[Array, "B L"]
    positions: Int32[Array, "B L"]
    valid: Bool[Array, "B L"]
    visible: Bool[Array, "B L L"]
    targets: Int32[Array, "B N"]  # clean tokens of the last N positions
    weights: Float32[Array, "B N"]  # of each target in the loss, 0 if it is not masked
    question: QuestionTargets | None = None


def add_noise(
    key: PRNGKeyArray,
    tokens: Int[Array, "B S"],
    prompt_lens: Int[Array, " B"],
    total_lens: Int[Array, " B"],
    config: NoiseConfig,
) -> NoisyBatch:
    """Returns the clean rows, each followed by masked copies of its answer blocks.

    Of an answer that touches more blocks than `answer_blocks`, it copies some that follow one
    another.
    """
    B, S = tokens.shape
    width = config.answer_blocks * config.block_size
    first = prompt_lens // config.block_size * config.block_size  # [B]
    spare = jnp.maximum(total_lens - first - width, 0) // config.block_size
    skipped = jax.random.randint(jax.random.fold_in(key, 1), (B,), 0, spare + 1)
    first = first + skipped * config.block_size
    place = first[:, None] + jnp.arange(width)  # [B, width], positions of one copy
    place = jnp.tile(place, (1, config.copies))  # [B, C * width]
    targets = jnp.take_along_axis(tokens, place, axis=1, mode="clip")
    is_real = place < total_lens[:, None]
    masked = draw_mask(key, is_real & (place >= prompt_lens[:, None]), config)
    clean_place = jnp.broadcast_to(jnp.arange(S), (B, S))
    return NoisyBatch(
        tokens=jnp.concatenate([tokens, jnp.where(masked, config.mask_token_id, targets)], axis=1),
        positions=jnp.concatenate([clean_place, place], axis=1),
        valid=jnp.concatenate([clean_place < total_lens[:, None], is_real], axis=1),
        visible=visibility(clean_place, place, config),
        targets=targets,
        weights=masked.astype(jnp.float32),
    )


def draw_mask(
    key: PRNGKeyArray, editable: Bool[Array, "B N"], config: NoiseConfig
) -> Bool[Array, "B N"]:
    """Masks each block's editable positions with a ratio t ~ U(0, 1), or all of them.

    It masks at least one editable position of every block; otherwise the block teaches nothing.
    """
    B, width = editable.shape
    shape = (B, width // config.block_size, config.block_size)
    key_ratio, key_full, key_place = jax.random.split(key, 3)
    ratio = jax.random.uniform(key_ratio, (*shape[:2], 1))
    is_full = jax.random.uniform(key_full, (*shape[:2], 1)) < config.full_mask_fraction
    can = editable.reshape(shape)
    draw = jnp.where(can, jax.random.uniform(key_place, shape), 2.0)
    lowest = jnp.min(draw, axis=-1, keepdims=True)
    masked = can & (is_full | (draw < ratio) | (draw == lowest))
    return masked.reshape(B, width)


def visibility(
    clean_place: Int[Array, "B S"], noisy_place: Int[Array, "B N"], config: NoiseConfig
) -> Bool[Array, "B L L"]:
    """Returns a mask that is true where the query (row) sees the key (column)."""
    clean = clean_place // config.block_size  # [B, S]
    noisy = noisy_place // config.block_size  # [B, C * width]
    chunk = jnp.arange(noisy.shape[1]) // config.block_size  # one id per copy and block
    B, S = clean.shape
    clean_clean = clean[:, :, None] >= clean[:, None, :]
    noisy_clean = noisy[:, :, None] > clean[:, None, :]
    noisy_noisy = jnp.broadcast_to(chunk[:, None] == chunk[None, :], (B, *2 * chunk.shape))
    clean_noisy = jnp.zeros((B, S, noisy.shape[1]), bool)
    return jnp.concatenate(
        [
            jnp.concatenate([clean_clean, clean_noisy], axis=2),
            jnp.concatenate([noisy_clean, noisy_noisy], axis=2),
        ],
        axis=1,
    )


def masked_cross_entropy(
    logits: Float32[Array, "B*N V"], targets: Int[Array, "B N"], weights: Float[Array, "B N"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Returns the weighted means of the loss in nats and of the accuracy."""
    targets, weight = targets.reshape(-1), weights.reshape(-1)
    count = jnp.maximum(jnp.sum(weight), 1.0)
    given = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - given
    right = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    return jnp.sum(loss * weight) / count, jnp.sum(right * weight) / count
