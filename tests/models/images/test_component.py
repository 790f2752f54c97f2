"""The weight tables of image components: parts, placeholders, complete tables."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdllm.models.images import component


class Layer(nnx.Module):
    def __init__(self, dtype: jnp.dtype):
        self.w_qkv = nnx.Param(jnp.zeros((8, 3), dtype))


class Tiny(nnx.Module):
    def __init__(self, num_layers: int, dtype: jnp.dtype):
        self.layers = nnx.List([Layer(dtype) for _ in range(num_layers)])
        self.kernel = nnx.Param(jnp.zeros((2, 3, 4, 5), dtype))


TABLE = """
conv.weight                 kernel[conv]
blocks.{i}.q.weight         layers.{i}.w_qkv[0:2/4]
blocks.{i}.k.weight         layers.{i}.w_qkv[2/4]
blocks.{i}.v.weight         layers.{i}.w_qkv[3/4]
"""


def tiny(table: str = TABLE) -> component.Component[int]:
    return component.Component(
        class_names=("Tiny",),
        read=lambda hf: hf["num_layers"],
        build=Tiny,
        weights=lambda _: table,
        example={"num_layers": 1},
    )


def test_each_tensor_fills_its_part():
    rows = {row.name: row for row in tiny().weight_rows(2)}
    assert rows["conv.weight"].shape == (5, 4, 2, 3)
    assert rows["blocks.1.q.weight"].shape == (4, 3)
    assert set(rows) == {"conv.weight", *(f"blocks.{i}.{n}.weight" for i in (0, 1) for n in "qkv")}
    array = np.zeros((8, 3))
    rows["blocks.1.k.weight"].write(array, np.ones((2, 3)))
    assert array.sum(axis=1).tolist() == [0, 0, 0, 0, 3, 3, 0, 0]
    kernel, stored = np.zeros((2, 3, 4, 5)), np.arange(120.0).reshape(5, 4, 2, 3)
    rows["conv.weight"].write(kernel, stored)
    assert kernel[1, 2, 3, 4] == stored[4, 3, 1, 2]


def test_one_tap_over_time_is_read():
    one = tiny(TABLE.replace("kernel[conv]", "kernel[conv@1/4]"))
    rows = {row.name: row for row in one.weight_rows(1)}
    assert rows["conv.weight"].shape == (5, 4, 4, 2, 3)
    stored = np.full((5, 4, 4, 2, 3), np.nan)
    stored[:, :, 1] = np.arange(120.0).reshape(5, 4, 2, 3)
    kernel = np.zeros((2, 3, 4, 5))
    rows["conv.weight"].write(kernel, stored)
    np.testing.assert_array_equal(kernel, stored[:, :, 1].transpose(2, 3, 1, 0))


def test_a_tensor_may_have_more_axes_of_size_one():
    table = TABLE.replace("kernel[conv]", "kernel[1x1x1]")
    (row,) = (row for row in tiny(table).weight_rows(1) if row.name == "conv.weight")
    assert row.shape == (2, 3, 4, 5, 1, 1, 1)
    kernel, stored = np.zeros((2, 3, 4, 5)), np.arange(120.0).reshape(row.shape)
    row.write(kernel, stored)
    np.testing.assert_array_equal(row.read(kernel), stored)
    np.testing.assert_array_equal(kernel, stored[..., 0, 0, 0])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE.replace("[3/4]", "[2/4]"), "every part of layers.0.w_qkv"),
        (TABLE.replace("kernel[conv]", "colonel[conv]"), "no parameter"),
        (TABLE + "more.weight  kernel[conv]", "every part of kernel"),
        (TABLE.replace("[3/4]", "[v]"), "no part"),
        (TABLE.replace("[3/4]", "[2/3]"), "no 3 equal parts"),
        (TABLE.replace("[conv]", "[conv@3/3]"), "taps count from 0 to 2"),
    ],
)
def test_a_table_that_does_not_fit_fails_at_once(table, message):
    with pytest.raises(ValueError, match=message):
        tiny(table)
