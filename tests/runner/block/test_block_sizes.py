"""A step has the size that saves the most time: blocks that are committed, or parts of blocks."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.runner.block.sizes import (
    FORWARD_TOKENS,
    choose,
    choose_size,
    commit_rows,
    part_counts,
    query_lengths,
    step_sizes,
)
from jdllm.runner.config import StepConfig


@pytest.mark.parametrize(("rows", "sizes"), [(4, (0, 4)), (16, (0, 4, 16)), (64, (0, 8, 64))])
def test_blocks_are_committed_beside_others_where_they_save_more_than_they_cost(rows, sizes):
    algorithms = ("LowConfidence", "JointThreshold")
    config = StepConfig(
        spec=None, pool=None, context_length=64, num_slots=rows, algorithms=algorithms
    )
    assert commit_rows(rows, config) == sizes
    tokens = rows * 32
    fixed = FORWARD_TOKENS
    for wanted in range(rows + 1):
        # Tokens' time for all rows: this step, and a forward for each row that got no slot.
        spent = [
            (tokens + 32 * size + fixed) + (wanted - min(wanted, size)) * (tokens + fixed) / rows
            for size in sizes
        ]
        place = int(choose_size(sizes, jnp.int32(wanted), tokens=tokens))
        assert spent[place] == pytest.approx(min(spent))
    few = choose_size(sizes, jnp.int32(1), tokens=tokens)
    assert (sizes[int(few)] > 0) == (rows < 64)


def config_of(rows, *algorithms, block_size=32, **options):
    diffusion = types.SimpleNamespace(block_size=block_size)
    return StepConfig(
        spec=types.SimpleNamespace(diffusion=diffusion),
        pool=None,
        context_length=64,
        num_slots=rows,
        algorithms=algorithms,
        **options,
    )


def test_parts_are_compiled_only_for_rules_that_leave_positions_out():
    assert part_counts(16, config_of(16, "LowConfidence", "SDAR")) == ()
    config = config_of(16, "LowConfidence", "HierarchyBlock")
    assert part_counts(16, config) == (16, 32)
    assert part_counts(16, config, is_coarse=True) == (16,)
    assert part_counts(2, config_of(2, "HierarchyBlock")) == (2,)
    for block_size in (4, 8, 12):  # nothing to save, or no whole parts
        assert part_counts(2, config_of(2, "HierarchyBlock", block_size=block_size)) == ()
    tokens = [size.num_tokens(16, 32) for size in step_sizes(16, config)]
    assert tokens == [16 * 8, 32 * 8, 16 * 32, 20 * 32, 32 * 32]


def test_steps_of_one_token_are_short_where_a_rule_may_write_one_at_a_time():
    for block_size, lengths in ((32, (8, 32)), (16, (8, 16)), (12, (12,)), (8, (8,)), (4, (4,))):
        config = config_of(4, "LowConfidence", "LinearSpec", block_size=block_size)
        assert query_lengths(config) == lengths
    assert query_lengths(config_of(4, "LowConfidence", "MaskedDiffusion")) == (32,)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_has_the_smallest_size_that_holds_its_parts(seed):
    rows, block = 8, 32
    sizes = step_sizes(rows, config_of(rows, "HierarchyBlock", fuses_commits=False))
    assert [size.parts for size in sizes] == [8, 16, None]
    rng = np.random.default_rng(seed)
    for share in (0.0, 0.02, 0.1, 0.5):
        forwards = rng.random((rows, block)) < share
        needed = sum(part.any() for row in forwards for part in np.split(row, block // 8))
        place = int(choose(sizes, jnp.int32(0), jnp.asarray(forwards)))
        assert place == (0 if needed <= 8 else 1 if needed <= 16 else 2)


def test_commits_come_before_parts():
    """A step that commits blocks forwards whole ones."""
    sizes = step_sizes(4, config_of(4, "HierarchyBlock"))
    assert [(size.parts, size.commits) for size in sizes] == [(4, 0), (None, 0), (None, 4)]
    few = jnp.zeros((4, 32), bool).at[0, :3].set(True)
    chosen = [int(choose(sizes, jnp.int32(wanted), few)) for wanted in (0, 4)]
    assert chosen == [0, 2]
