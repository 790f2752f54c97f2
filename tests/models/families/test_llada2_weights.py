"""Rows of the LLaDA2 table write the array layouts that the kernels expect."""

import json
import pathlib

import numpy as np
import pytest

import pallas_kernels
from jdllm.models.families import llada2

GOLDEN = pathlib.Path(__file__).parents[2] / "data" / "goldens" / "llada2"


def rows_of_layer(layer, **changes):
    hf = json.loads((GOLDEN / "config.json").read_text()) | changes
    rows = llada2.FAMILY.weight_rows(llada2.FAMILY.parse_config(hf, block_size=8))
    return {row.name: row for row in rows if row.name.startswith(f"model.layers.{layer}.mlp.")}


@pytest.mark.parametrize("width", [16, 128], ids=["one-group", "two-groups"])
@pytest.mark.parametrize("form", ["split", "merged", "fused"])
def test_every_form_of_experts_gives_the_kernel_layout(width, form):
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 32, width, 64)).astype(np.float32)
    rows = rows_of_layer(1, moe_intermediate_size=width)
    array = np.full((32, 2 * width, 64), np.nan, np.float32)
    prefix = "model.layers.1.mlp."
    if form == "fused":
        rows[prefix + "w1"].write(array, np.concatenate([gate, up], axis=1))
    elif form == "merged":
        rows[prefix + "experts.gate_proj"].write(array, gate)
        rows[prefix + "experts.up_proj"].write(array, up)
    else:
        for e in range(32):
            rows[f"{prefix}experts.{e}.gate_proj.weight"].write(array, gate[e])
            rows[f"{prefix}experts.{e}.up_proj.weight"].write(array, up[e])
    np.testing.assert_array_equal(array, pallas_kernels.interleave_gate_up(gate, up))
    np.testing.assert_array_equal(rows[prefix + "experts.up_proj"].read(array), up)


def test_gate_comes_first_in_dense_layers():
    rows = rows_of_layer(0, intermediate_size=16)
    array = np.zeros((32, 64), np.float32)
    rows["model.layers.0.mlp.gate_proj.weight"].write(array, np.ones((16, 64)))
    np.testing.assert_array_equal(array[:16], 1)
    np.testing.assert_array_equal(array[16:], 0)


@pytest.mark.parametrize("width", [16, 128], ids=["one-group", "two-groups"])
def test_the_shared_expert_has_the_layout_of_the_routed_ones(width):
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, width, 64)).astype(np.float32)
    down = rng.normal(size=(64, width)).astype(np.float32)
    rows = rows_of_layer(1, moe_intermediate_size=width)
    prefix = "model.layers.1.mlp.shared_experts."
    gate_up, stored = np.full((2 * width, 64), np.nan, np.float32), np.zeros((64, width))
    rows[prefix + "gate_proj.weight"].write(gate_up, gate)
    rows[prefix + "up_proj.weight"].write(gate_up, up)
    rows[prefix + "down_proj.weight"].write(stored, down)
    np.testing.assert_array_equal(gate_up, pallas_kernels.interleave_gate_up(gate, up))
    np.testing.assert_array_equal(stored, down)
    np.testing.assert_array_equal(rows[prefix + "up_proj.weight"].read(gate_up), up)
