"""The sizes of a denoising step that are compiled, and which of them a step has.

A step forwards the blocks of all rows, and beside them C blocks that are committed. Or it forwards
P parts of blocks, where rules leave out so many positions that the others fit into P parts.

Letters: R rows, L tokens of a block.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jdllm import decoding
from jdllm.decoding.block import interface
from jdllm.runner.config import StepConfig

# The fixed time of a forward, in tokens that take as long. LLaDA2.0-mini on an H200 takes 10.5 ms
# for 16 rows of 32 tokens and 15.1 ms for 64 rows: 9.0 ms, and 0.096 ms for each row.
FORWARD_TOKENS = 3072
# Tokens of a part: those of a sub-block by default.
PART_TOKENS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """A compiled size: `commits` is C, `parts` is P; without P the step forwards whole blocks."""

    commits: int = 0
    parts: int | None = None

    def num_tokens(self, rows: int, block_size: int) -> int:
        """Returns how many tokens the step forwards, padding included."""
        if self.parts is not None:
            return self.parts * part_tokens(block_size)
        return (rows + self.commits) * block_size


def step_sizes(rows: int, config: StepConfig, *, is_coarse: bool = False) -> tuple[StepSize, ...]:
    """Returns the compiled sizes of a step of `rows` rows: those of parts first, ascending.

    `is_coarse`: as few as possible, for launches that are rare.
    """
    parts = part_counts(rows, config, is_coarse=is_coarse)
    commits = commit_rows(rows, config, is_coarse=is_coarse)
    return tuple(StepSize(parts=P) for P in parts) + tuple(StepSize(commits=C) for C in commits)


def commit_rows(rows: int, config: StepConfig, *, is_coarse: bool = False) -> tuple[int, ...]:
    """Returns the compiled numbers C of committed blocks in a step of `rows` rows, ascending."""
    needs = any(decoding.BLOCK_ALGORITHMS[name].persists_apart for name in config.algorithms)
    if not config.fuses_commits or not needs:
        return (0,)
    # A small C serves rows that finish blocks at different steps, the largest C rows in lockstep.
    return (0, rows) if rows < 8 or is_coarse else (0, max(4, rows // 8), rows)


def part_tokens(block_size: int) -> int:
    """Returns the tokens of a part of a block."""
    return block_size if block_size % PART_TOKENS else PART_TOKENS


def part_counts(rows: int, config: StepConfig, *, is_coarse: bool = False) -> tuple[int, ...]:
    """Returns the compiled numbers P of parts, ascending, each less than all parts of all rows."""
    of_a_row = config.block_size // part_tokens(config.block_size)
    leaves_out = any(decoding.BLOCK_ALGORITHMS[name].forwards_parts for name in config.algorithms)
    if of_a_row == 1 or not leaves_out:
        return ()
    # A part of each row, and for rows out of phase a few whole blocks beside these.
    return (rows,) if rows < 8 or is_coarse or of_a_row == 2 else (rows, 2 * rows)


def query_lengths(config: StepConfig) -> tuple[int, ...]:
    """Returns the compiled numbers of positions of a block in a step of a causal family, ascending.

    Rules that draft may do without: then a step computes one position of each row.
    """
    drafts = any(
        isinstance(decoding.BLOCK_ALGORITHMS[name], interface.DraftingAlgorithm)
        for name in config.algorithms
    )
    short = part_tokens(config.block_size)
    return (
        (short, config.block_size) if drafts and short < config.block_size else (config.block_size,)
    )


def choose(
    sizes: tuple[StepSize, ...], wanted: Int32[Array, ""], forwards: Bool[Array, "R L"]
) -> Int32[Array, ""]:
    """Returns the index of the size of a step that computes the positions `forwards`.

    `wanted` counts the rows whose blocks could be committed beside others.
    """
    commits = tuple(size.commits for size in sizes if size.parts is None)
    chosen = choose_size(commits, wanted, tokens=forwards.size)
    counts = [size.parts for size in sizes if size.parts is not None]
    if not counts:
        return chosen
    of_parts = forwards.reshape(forwards.shape[0], -1, part_tokens(forwards.shape[1]))
    needed = jnp.sum(jnp.any(of_parts, axis=2), dtype=jnp.int32)
    too_small = jnp.sum(needed > jnp.asarray(counts, jnp.int32), dtype=jnp.int32)
    return jnp.where(chosen > 0, len(counts) + chosen, too_small)


def choose_size(
    sizes: tuple[int, ...], wanted: Int32[Array, ""], *, tokens: int
) -> Int32[Array, ""]:
    """Returns the index of the number of commits that saves the most time for `wanted` rows.

    A step of all R rows has `tokens` tokens and takes as long as `tokens + FORWARD_TOKENS`. A
    committed block saves its row one forward, which is an R-th of a step. Each of the C blocks,
    used or not, lengthens this step by the tokens of a block, an R-th of `tokens`.
    """
    used = jnp.minimum(wanted, jnp.asarray(sizes, jnp.int32))
    saved = used * (tokens + FORWARD_TOKENS) - jnp.asarray(sizes, jnp.int32) * tokens
    return jnp.argmax(saved).astype(jnp.int32)
