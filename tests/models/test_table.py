"""Rows of a table written as text fill the parts of parameters that their names say."""

import numpy as np
import pytest

from jdllm.layers import attention, mlp, rope
from jdllm.models import decoder_config, table

HEADS = attention.AttentionConfig(
    dim=6,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=2,
    rope=rope.RopeConfig(rotary_dim=2, theta=100.0),
)
WIDE_HEADS = attention.AttentionConfig(
    dim=6,
    num_query_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope=rope.RopeConfig(rotary_dim=4, theta=100.0),
)


def config(*kinds):
    return decoder_config.DecoderConfig(
        spec=None,
        layers=tuple(
            decoder_config.LayerConfig(attention=kind, feed_forward=mlp.MLPConfig(width=3))
            for kind in kinds
        ),
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )


def rows_of(text, shapes, *kinds, **forms):
    weights = table.WeightTable(layers="blocks", rows=text, forms=forms)
    arrays = {path: np.empty(shape) for path, shape in shapes.items()}
    return {row.name: row for row in weights.expand(config(*kinds), arrays)}


def test_a_layer_is_named_on_both_sides():
    shapes = {"norm.weight": (6,), "layers.0.norm.weight": (6,), "layers.1.norm.weight": (6,)}
    text = """
    ln.weight          norm.weight
    {layer}.ln.weight  {layer}.norm.weight
    """
    rows = rows_of(text, shapes, HEADS, HEADS)
    assert {name: row.target for name, row in rows.items()} == {
        "ln.weight": "norm.weight",
        "blocks.0.ln.weight": "layers.0.norm.weight",
        "blocks.1.ln.weight": "layers.1.norm.weight",
    }
    assert {row.shape for row in rows.values()} == {(6,)}


def test_rows_without_their_parameter_do_not_count():
    rows = rows_of("{layer}.a {layer}.a\nhead lm_head", {"layers.1.a": (6,)}, HEADS, HEADS)
    assert list(rows) == ["blocks.1.a"]


def test_heads_are_those_of_each_layer():
    text = "\n".join(f"{{layer}}.{part} {{layer}}.w_qkv[{part}]" for part in "qkv")
    shapes = {"layers.0.w_qkv": (16, 6), "layers.1.w_qkv": (16, 6)}
    rows = rows_of(text, shapes, HEADS, WIDE_HEADS)
    array = np.arange(16 * 6).reshape(16, 6)
    for layer, ends in enumerate(((8, 12), (8, 12))):
        for part, expected in zip("qkv", np.split(array, ends)):
            row = rows[f"blocks.{layer}.{part}"]
            assert row.shape == expected.shape
            np.testing.assert_array_equal(row.read(array), expected)


def test_biases_are_cut_like_their_weights():
    rows = rows_of("{layer}.k {layer}.b[k]", {"layers.0.b": (16,)}, HEADS)
    np.testing.assert_array_equal(rows["blocks.0.k"].read(np.arange(16)), [8, 9, 10, 11])


def test_experts_have_a_row_each_in_a_form_of_their_own():
    rows = rows_of(
        "",
        {"layers.0.w_down": (3, 6, 2)},
        HEADS,
        split="{layer}.{expert}.down {layer}.w_down[{expert}]",
        merged="{layer}.down {layer}.w_down",
    )
    array = np.arange(36).reshape(3, 6, 2)
    for expert in range(3):
        row = rows[f"blocks.0.{expert}.down"]
        assert (row.form, row.shape) == ("split", (6, 2))
        np.testing.assert_array_equal(row.read(array), array[expert])
    assert (rows["blocks.0.down"].form, rows["blocks.0.down"].shape) == ("merged", (3, 6, 2))


@pytest.mark.parametrize(
    "line",
    [
        "alone",
        "a b c",
        "a b[]",
        "a b[q",
        "a b[sideways]",
        "{layer}.a b",
        "a.{expert} b",
        "a b[{expert}]",
    ],
)
def test_lines_that_are_no_rows_are_named(line):
    with pytest.raises(ValueError) as error:
        rows_of(line, {"b": (6,)}, HEADS)
    assert repr(line) in str(error.value)
