"""FullAttnMultiBlock: d3LLM's decoding of several blocks at a time, by entropy.

Blocks are created one after the other. A new block is created when the share
`block_add_threshold` of the block before it is written. All created blocks are decoded at once. A
position is written if its entropy passes the threshold. In addition, every step writes at least
one token of the first block that is not finished. That block is always fully activated, because
the block before it is finished; `decoded_token_threshold` (a share, at most 1) makes no difference.
So this rule does not need the reference's two kinds of created blocks, and the option never
changes a result.

There are two published rules. LLaDA's writes positions with entropy <= threshold, and the position
of the lowest entropy. Dream's (`is_shifted`, also SGLang's pull request) writes positions with
entropy < threshold.

Early stop: all positions after the first end token become the end of text at once, because the
model has seen this in training. The end token itself may be another one (the end of a turn); a
canvas full of those misleads the model about the open positions before them. A request's own end
tokens count, too. The model might go on after them; the fill tells it that no text follows.

K,V (`cache_mode`): a finished block is cached after `cache_delay_iter` forwards of all its tokens.
Blocks are cached in order, so in every mode the cache is [0, `cached`). A refresh forwards the
whole canvas. It overwrites the cached K,V in place, so no data moves.

* exact: every forward is full.
* delayed: a step forwards [cached, length). A full forward runs every `refresh_interval` forwards,
  before anything is cached, and while a finished block waits for its delay. A refresh that is due
  always runs, so an interval of 1 is `exact`; in the reference, caching has priority.
* window: a step forwards [cached, end of the created blocks). The first forward is full, and so is
  every `refresh_interval`-th. Later positions keep the K,V of the last full forward.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jdllm.algorithms import lookup
from jdllm.decoding.canvas import interface, rules
from jdllm.decoding.canvas.interface import Canvas, CanvasProposal, Window

EXACT = lookup.word("FullAttnMultiBlock", "cache_mode", "exact")
WINDOW = lookup.word("FullAttnMultiBlock", "cache_mode", "window")
NOT_YET = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """The blocks of each row; all positions of a block have the same `finished_at`.

    `initial`: masked before the first forward. `created`: number of created blocks.
    `first_open`: the first block that was not finished at the last plan.
    `finished_at`: number of the forward (from 1) whose plan found the block finished; 0 in the
    prompt, `NOT_YET` for blocks that are not finished. `cached`: where the cache ends.
    """

    initial: Bool[Array, "R S"]
    created: Int32[Array, " R"]
    first_open: Int32[Array, " R"]
    finished_at: Int32[Array, "R S"]
    cached: Int32[Array, " R"]


@dataclasses.dataclass(frozen=True, slots=True)
class FullAttnMultiBlock:
    """The rule of LLaDA's release, or of Dream's (`is_shifted`)."""

    is_shifted: bool = False

    tempers = False
    guides = False

    def begin(self, canvas: Canvas) -> BlockTable:
        is_prompt = canvas.positions < canvas.start[:, None]
        return BlockTable(
            initial=canvas.masked,
            created=jnp.ones_like(canvas.start),
            first_open=jnp.zeros_like(canvas.start),
            finished_at=jnp.where(is_prompt, 0, NOT_YET).astype(jnp.int32),
            cached=jnp.zeros_like(canvas.start),
        )

    def plan(self, canvas: Canvas) -> tuple[Canvas, Window]:
        canvas, first_end = _stop_early(canvas)
        created, first_open = _create(canvas, first_end), rules.first_block(canvas)
        created_end = rules.block_start(canvas, created)
        finished_end = jnp.minimum(created_end, rules.block_start(canvas, first_open))
        before = canvas.extra.cached
        finished_at, cached = self._cache(canvas, finished_end)

        mode, forward = canvas.params.cache_mode, canvas.step + 1
        is_due = forward % jnp.maximum(canvas.params.refresh_interval, 1) == 0
        waits = (finished_end > cached) & (cached == before)
        is_full = is_due | jnp.where(mode == WINDOW, forward == 1, waits) | (mode == EXACT)
        planned = dataclasses.replace(
            canvas,
            extra=BlockTable(
                initial=canvas.extra.initial,
                created=created,
                first_open=first_open,
                finished_at=finished_at,
                cached=cached,
            ),
        )
        return rules.window(
            planned,
            low=jnp.where(is_full, 0, before),
            high=jnp.where(is_full | (mode != WINDOW), canvas.length, created_end),
            wanted=canvas.positions < created_end[:, None],
        )

    def update(self, canvas: Canvas, proposal: CanvasProposal) -> Canvas:
        """Writes what passes in created blocks, and at least one position of the first open one."""
        table = canvas.extra
        created_end = rules.block_start(canvas, table.created)
        first_end = rules.block_start(canvas, table.first_open + 1)
        eligible = canvas.masked & (canvas.positions < created_end[:, None])
        entropy, threshold = proposal.entropy, canvas.params.threshold[:, None]
        if self.is_shifted:
            where = eligible & (entropy < threshold)
        else:
            where = eligible & (entropy <= threshold) | rules.lowest(entropy, eligible)
        # If any position of the first open block passes, the one of the lowest entropy passes too.
        where |= rules.lowest(entropy, eligible & (canvas.positions < first_end[:, None]))
        return canvas.write(proposal.tokens, where=where)

    def _cache(
        self, canvas: Canvas, finished_end: Int32[Array, " R"]
    ) -> tuple[Int32[Array, "R S"], Int32[Array, " R"]]:
        """Returns (finished_at, cached), including the blocks that the next forward caches.

        LLaDA's rule ignores blocks after a block that waits, so delays come one after the other.
        """
        table, forward = canvas.extra, canvas.step[:, None] + 1
        delay = canvas.params.cache_delay_iter
        is_ready = forward - table.finished_at >= delay[:, None]
        ends = jnp.where(is_ready, canvas.positions + 1, 0)
        ready = jnp.maximum(jnp.max(ends, axis=1).astype(jnp.int32), table.cached)
        reach = finished_end
        if not self.is_shifted:
            following = jnp.where(
                ready < canvas.start, canvas.start, ready + canvas.params.block_length
            )
            reach = jnp.where(delay > 0, jnp.minimum(reach, following), reach)
        is_new = (canvas.positions < reach[:, None]) & (table.finished_at == NOT_YET)
        finished_at = jnp.where(is_new, forward, table.finished_at)
        # Only without a delay are the new positions (up to `reach`) ready at once.
        return finished_at, jnp.where(delay > 0, ready, jnp.maximum(ready, reach))


def _stop_early(canvas: Canvas) -> tuple[Canvas, Int32[Array, " R"]]:
    """Returns the canvas, filled after the first end token of each row, and this token's position.

    For rows without an end token or without early stop, the position is S.
    """
    S = canvas.positions.shape[0]
    first = jnp.where(canvas.params.early_stop, interface.first_end(canvas), S)
    behind = canvas.extra.initial & (canvas.positions > first[:, None])
    behind &= ~canvas.is_done[:, None]
    filled = dataclasses.replace(
        canvas,
        tokens=jnp.where(behind, canvas.filler[:, None], canvas.tokens),
        masked=canvas.masked & ~behind,
    )
    return filled, first


def _create(canvas: Canvas, first_end: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """Returns the number of created blocks, one more if enough of the last one is written.

    A block without positions to write (all are given) is finished. If the created blocks have no
    mask left, the result includes all blocks up to the next masked position.
    """
    table, positions = canvas.extra, canvas.positions
    last = rules.block_start(canvas, table.created - 1)
    following = rules.block_start(canvas, table.created)
    is_last = table.initial & (positions >= last[:, None]) & (positions < following[:, None])
    total = jnp.sum(is_last, axis=1, dtype=jnp.int32)
    left = jnp.sum(is_last & canvas.masked, axis=1, dtype=jnp.int32)
    progress = (total - left) / jnp.maximum(total, 1)
    is_enough_written = (left == 0) | (progress >= canvas.params.block_add_threshold)
    is_possible = (following < canvas.end) & (following <= first_end)
    created = table.created + (is_enough_written & is_possible)
    has_masked = interface.first_masked(canvas) < canvas.end
    return jnp.where(has_masked, jnp.maximum(created, rules.first_block(canvas) + 1), created)
