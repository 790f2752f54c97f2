"""What `match` says of a checkpoint that does not fit its table."""

import pytest

from jdllm import errors
from jdllm.checkpoint import weight_table


def test_long_lists_are_cut_and_counted():
    rows = [weight_table.WeightRow(name=f"t{i}", shape=(1,), target=f"t{i}") for i in range(50)]
    with pytest.raises(errors.ConfigError) as error:
        weight_table.match(rows, {})
    assert "50 tensors missing" in str(error.value)
    assert "... and 30 more" in str(error.value)
    assert len(str(error.value).splitlines()) == 23
