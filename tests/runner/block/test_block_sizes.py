"""A step commits as many blocks beside the denoised ones as saves the most time."""

import jax.numpy as jnp
import pytest

from jdllm.runner import config as config_lib
from jdllm.runner.block import sizes as sizes_lib


@pytest.mark.parametrize(("rows", "sizes"), [(4, (0, 4)), (16, (0, 4, 16)), (64, (0, 8, 64))])
def test_blocks_are_committed_beside_others_where_they_save_more_than_they_cost(rows, sizes):
    algorithms = ("LowConfidence", "JointThreshold")
    config = config_lib.StepConfig(
        spec=None, pool=None, context_length=64, num_slots=rows, algorithms=algorithms
    )
    assert sizes_lib.commit_rows(rows, config) == sizes
    tokens = rows * 32
    fixed = sizes_lib.FORWARD_TOKENS
    for wanted in range(rows + 1):
        # Tokens' time for all rows: this step, and a forward for each row that got no slot.
        spent = [
            (tokens + 32 * size + fixed) + (wanted - min(wanted, size)) * (tokens + fixed) / rows
            for size in sizes
        ]
        place = int(sizes_lib.choose_size(sizes, jnp.int32(wanted), tokens=tokens))
        assert spent[place] == pytest.approx(min(spent))
    few = sizes_lib.choose_size(sizes, jnp.int32(1), tokens=tokens)
    assert (sizes[int(few)] > 0) == (rows < 64)
