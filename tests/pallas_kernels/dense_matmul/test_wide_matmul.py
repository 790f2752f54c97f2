"""The wide matmul kernel equals numpy in float64 in the interpreter and lowers for CUDA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import marks

from pallas_kernels import device, tiles
from pallas_kernels.dense_matmul import wide_matmul
from pallas_kernels.dense_matmul.wide_matmul import Plan
from pallas_kernels.hopper import compat

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support import devices
from support.dense_products import (
    TOLERANCE,
    arrays,
    check_equals_numpy,
    check_rows_are_their_own,
    expected,
    interpreted,
)

Tile = wide_matmul.Tile
# name: (tokens, result's columns, contraction, swiglu, tile); they cover all branches of the
# kernel. The clusters are small: the interpreter hangs if more threads wait for one another than it
# has.
WAYS = {
    "one-step": (192, 32, 64, False, Tile(tokens=192, columns=32)),
    "more-steps-than-stages": (144, 64, 320, False, Tile(tokens=192, columns=32, stages=3)),
    "ragged-tokens-and-columns": (208, 80, 128, False, Tile(tokens=256, columns=32, stages=2)),
    "tiles-of-tokens": (208, 48, 128, False, Tile(tokens=128, columns=48, stages=2)),
    "rows-of-128": (208, 48, 128, False, Tile(tokens=256, rows=128, columns=48, stages=2)),
    "whole-rows-past-the-tokens": (144, 48, 128, False, Tile(tokens=256, columns=48, stages=2)),
    "a-whole-tile-past-the-tokens": (
        144, 32, 128, False, Tile(tokens=192, columns=32, share_weights=2, stages=2),
    ),
    "splits": (144, 48, 512, False, Tile(tokens=192, columns=48, splits=4, stages=2)),
    "share-tokens": (144, 64, 256, False, Tile(tokens=192, columns=32, share_tokens=2, stages=2)),
    "share-tokens-past-the-columns": (
        144, 80, 256, False, Tile(tokens=192, columns=32, share_tokens=2, stages=2),
    ),
    "share-weights": (208, 32, 256, False, Tile(tokens=128, columns=32, share_weights=2, stages=2)),
    "swapped": (144, 128, 192, False, Tile(tokens=192, columns=128, swapped=True, stages=2)),
    "swapped-of-128": (
        208, 192, 256, False,
        Tile(tokens=128, columns=256, rows=128, swapped=True, splits=2, stages=2),
    ),
    "swapped-sharing": (
        144, 192, 256, False,
        Tile(tokens=192, columns=128, share_tokens=2, swapped=True, stages=3),
    ),
    "swiglu": (144, 96, 128, True, Tile(tokens=192, columns=48, stages=2)),
    "swiglu-sharing": (
        208, 112, 256, True, Tile(tokens=128, columns=32, share_weights=2, stages=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", marks.every(2, WAYS))
def test_equals_numpy(way):
    check_equals_numpy(wide_matmul.wide_matmul, *WAYS[way])


@pytest.mark.parametrize("way", ["tiles-of-tokens", "share-tokens"])
def test_few_multiprocessors_walk_many_tiles(monkeypatch, way):
    """They may also get different numbers of tiles."""
    tokens, columns, contraction, swiglu, tile = WAYS[way]
    columns *= 3
    few = dataclasses.replace(device.local_device(), num_multiprocessors=2 * tile.cluster)
    devices.pretend(monkeypatch, few)
    x, w = arrays(tokens, columns, contraction, swiglu)
    (out,) = interpreted(wide_matmul.wide_matmul, x, w, swiglu=swiglu, tile=tile)
    np.testing.assert_allclose(out, expected(x, w, swiglu), **TOLERANCE)


def test_float16():
    x, w = arrays(144, 32, 128, False, dtype=jnp.float16)
    (out,) = interpreted(wide_matmul.wide_matmul, x, w, tile=Tile(tokens=192, columns=32, stages=2))
    np.testing.assert_allclose(out, expected(x, w, False), **TOLERANCE)


@pytest.mark.parametrize("way", ["swapped-of-128", "swiglu-sharing"])
def test_a_row_ignores_its_neighbours_bit_for_bit_and_nan_stays_in_its_row(way):
    check_rows_are_their_own(wide_matmul.wide_matmul, *WAYS[way])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swiglu": True, "tile": Tile(tokens=192, columns=32, splits=2)}, "whole contraction"),
        ({"swiglu": True, "tile": Tile(tokens=192, columns=128, swapped=True)}, "be swapped"),
        ({"tile": Tile(tokens=192, columns=32, splits=3)}, "divide the contraction"),
        ({"tile": Tile(tokens=256, columns=160)}, "80 accumulators in 104 registers"),
        ({"tile": Tile(tokens=192, columns=208)}, "wgmma of 208 columns"),
        ({"tile": Tile(tokens=256, rows=128, columns=256)}, "256 accumulators in 232 registers"),
        ({}, "no tile is known"),
    ],
)
def test_tiles_that_do_not_fit_are_refused_with_the_shapes(options, message):
    x, w = arrays(144, 64, 256, False)
    with pytest.raises(ValueError, match=message) as caught:
        wide_matmul.wide_matmul(x, w, **options)
    assert "(144, 256)" in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "columns", "contraction", "message"),
    [
        (112, 64, 256, "fewer tokens than a store"),
        (136, 64, 256, "tokens must be a multiple of 16"),
        (144, 40, 256, "columns must be a multiple of 16"),
        (144, 64, 224, "divide the contraction"),
    ],
)
def test_shapes_that_no_tile_serves_are_refused(tokens, columns, contraction, message):
    x, w = arrays(tokens, columns, contraction, False)
    with pytest.raises(ValueError, match=message):
        wide_matmul.wide_matmul(x, w, tile=Tile(tokens=256, rows=128, columns=32))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 200},
        {"tokens": 64},
        {"tokens": 320},
        {"columns": 20},
        {"rows": 96},
        {"share_tokens": 4},
        {"share_tokens": 2, "share_weights": 2},
        {"stages": 1},
    ],
)
def test_impossible_tiles_are_refused(changes):
    with pytest.raises(ValueError, match="no such tile"):
        Tile(**{"tokens": 192, "columns": 64} | changes)


MEASURED = [entry for entry in tiles.entries("dense_matmul") if entry["tile"]]


def name_of(entry):
    return "x".join(str(size) for size in (entry["when"] | entry["equal"]).values())


@pytest.mark.parametrize("entry", MEASURED, ids=name_of)
def test_every_entry_suits_its_shape_and_lowers_for_cuda(entry):
    tokens, (columns, contraction, halves) = entry["when"]["tokens"], entry["equal"].values()
    tile = wide_matmul.tile_for(tokens, columns, contraction, swiglu=halves == 2)
    assert tile == Tile(**entry["tile"])
    plan = Plan(
        tile=tile, tokens=tokens, columns=columns, contraction=contraction, halves=halves,
        dtype=jnp.dtype(jnp.bfloat16),
    )  # fmt: skip
    assert not plan.problems()
    assert tokens % (tile.tokens * tile.share_weights) == 0  # whole tiles
    assert plan.layout()[0] >= 3  # stages: loads run ahead
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((tokens, contraction), (halves * columns, contraction))
    ]
    call = jax.jit(lambda x, w: wide_matmul.wide_matmul(x, w, swiglu=halves == 2))
    traced = call.trace(*arguments)
    assert [out.shape for out in traced.out_info] == [(tokens, columns)] * tile.splits
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("tokens", [160, 224, 320])
def test_tokens_between_the_entries_are_not_copied(tokens):
    """Padding x and slicing each part would be separate launches."""
    arguments = [jax.ShapeDtypeStruct((n, 12288), jnp.bfloat16) for n in (tokens, 4096)]
    traced = jax.jit(wide_matmul.wide_matmul).trace(*arguments)
    assert [out.shape for out in traced.out_info] == [(tokens, 4096)] * 4
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "stablehlo.slice" not in text
    assert wide_matmul.tile_for(tokens + 8, 4096, 12288, swiglu=False) is None
