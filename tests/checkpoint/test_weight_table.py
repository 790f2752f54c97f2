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


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_names_of_the_decoder_may_lack_their_prefix(prefix):
    rows = [
        weight_table.WeightRow(name=name, shape=(1,), target=name)
        for name in ("model.norm.weight", "lm_head.weight")
    ]
    shapes = {f"{prefix}norm.weight": (1,), "lm_head.weight": (1,)}
    fills = weight_table.match(rows, shapes)
    assert fills["model.norm.weight"][0].tensor == f"{prefix}norm.weight"
    both = shapes | {"model.norm.weight": (1,), "norm.weight": (1,)}
    with pytest.raises(errors.ConfigError, match=r"matched twice:\n  model.norm.weight by"):
        weight_table.match(rows, both)
