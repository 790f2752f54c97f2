"""The dense matmul kernel equals numpy in float64 in the interpreter and lowers for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import marks

from pallas_kernels.dense_matmul import mosaic_gpu
from pallas_kernels.hopper import compat, limits

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support.dense_products import (
    TOLERANCE,
    arrays,
    check_equals_numpy,
    check_rows_are_their_own,
    expected,
    interpreted,
)

Tile = mosaic_gpu.Tile
# name: (tokens, result's columns, contraction, swiglu, tile); they cover all branches of the
# kernel.
WAYS = {
    "one-step": (8, 32, 64, False, Tile(columns=32)),
    "more-steps-than-stages": (16, 128, 640, False, Tile(columns=64, stages=3)),
    "ragged-tokens-and-columns": (21, 80, 128, False, Tile(columns=32, stages=2)),
    "two-warpgroups": (80, 96, 192, False, Tile(columns=48, stages=2)),
    "splits": (16, 96, 512, False, Tile(columns=48, splits=4, stages=2)),
    "cluster": (32, 128, 256, False, Tile(columns=32, cluster=2, stages=2)),
    "cluster-and-splits": (96, 64, 512, False, Tile(columns=32, cluster=2, splits=2, stages=3)),
    "block-k": (16, 64, 512, False, Tile(columns=32, splits=2, block_k=128, stages=2)),
    "burst": (24, 128, 768, False, Tile(columns=64, stages=3, burst=2)),
    "burst-of-all-steps": (16, 64, 128, False, Tile(columns=64, burst=2)),
    "swiglu-burst-cluster": (80, 112, 512, True, Tile(columns=32, cluster=2, stages=4, burst=2)),
    "staggered": (
        16, 128, 768, False, Tile(columns=32, cluster=2, splits=2, stages=2, staggered=True),
    ),
    "swiglu": (13, 96, 128, True, Tile(columns=48, stages=2)),
    "swiglu-ragged-cluster": (80, 112, 256, True, Tile(columns=32, cluster=2, stages=2)),
    "swiglu-staggered": (32, 176, 256, True, Tile(columns=96, cluster=2, staggered=True)),
}  # fmt: skip


@pytest.mark.parametrize("way", marks.every(2, WAYS))
def test_equals_numpy(way):
    check_equals_numpy(mosaic_gpu.dense_matmul, *WAYS[way])


def test_stores_in_pieces_where_shared_memory_is_short(monkeypatch):
    """The output buffer is filled and stored three times, as for 128 tokens and 144 columns."""
    tile = Tile(columns=96, stages=2)
    stage, piece = 2 * (96 + 64) * 64, 2 * 64 * 32
    monkeypatch.setattr(limits, "BUFFERS", 2 * stage + piece)
    x, w = arrays(40, 96, 128, False)
    (out,) = interpreted(mosaic_gpu.dense_matmul, x, w, tile=tile)
    np.testing.assert_allclose(out, expected(x, w, False), **TOLERANCE)


def test_float16():
    x, w = arrays(8, 64, 128, False, dtype=jnp.float16)
    (out,) = interpreted(mosaic_gpu.dense_matmul, x, w, tile=Tile(columns=32, stages=2))
    np.testing.assert_allclose(out, expected(x, w, False), **TOLERANCE)


def test_float16_is_not_split_since_a_part_may_overflow():
    half = jax.ShapeDtypeStruct((32, 4096), jnp.float16)
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float16)
    assert len(jax.eval_shape(mosaic_gpu.dense_matmul, half, w)) == 1
    wide = (jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in (half, w))
    assert len(jax.eval_shape(mosaic_gpu.dense_matmul, *wide)) > 1


@pytest.mark.parametrize("way", ["cluster-and-splits", "swiglu-ragged-cluster"])
def test_a_row_ignores_its_neighbours_bit_for_bit_and_nan_stays_in_its_row(way):
    check_rows_are_their_own(mosaic_gpu.dense_matmul, *WAYS[way])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swiglu": True, "tile": Tile(columns=32, splits=2)}, "whole contraction"),
        ({"tile": Tile(columns=32, splits=3)}, "divide the contraction"),
        ({"tile": Tile(columns=32, burst=8)}, "divide the contraction"),
        ({"tile": Tile(columns=64, cluster=2)}, "divide the tiles"),
        ({"tile": Tile(columns=32, cluster=2)}, "divide the tokens"),
    ],
)
def test_tiles_that_do_not_fit_are_refused_with_the_shapes(options, message):
    x, w = arrays(8, 64, 256, False)
    with pytest.raises(ValueError, match=message) as caught:
        mosaic_gpu.dense_matmul(x, w, **options)
    assert "(8, 256)" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"columns": 24}, {"cluster": 4}, {"block_k": 96}, {"burst": 0}, {"burst": 4, "stages": 4}],
)
def test_impossible_tiles_are_refused(changes):
    with pytest.raises(ValueError, match="no such tile"):
        Tile(**{"columns": 64} | changes)


# name: (columns, contraction, swiglu, tile for 128 tokens)
SHAPES = {
    "llada-qkv": (12288, 4096, False, Tile(columns=96, cluster=2)),
    "llada-out": (4096, 4096, False, Tile(columns=128, splits=4, cluster=2)),
    "llada-gate-up": (12288, 4096, True, Tile(columns=96, cluster=2, burst=2)),
    "llada-down": (4096, 12288, False, Tile(columns=128, splits=4, cluster=2)),
    "dream-qkv": (4608, 3584, False, Tile(columns=80, splits=2, cluster=2)),
    "dream-out": (3584, 3584, False, Tile(columns=64, splits=2, cluster=2)),
    "dream-gate-up": (18944, 3584, True, Tile(columns=144, cluster=2, staggered=True)),
    "dream-down": (3584, 18944, False, Tile(columns=112, splits=4, cluster=2)),
    "mini-qkv": (3072, 2048, False, Tile(columns=48, splits=2, cluster=2)),
    "mini-out": (2048, 2048, False, Tile(columns=32, splits=2, cluster=2)),
    "mini-gate-up": (5120, 2048, True, Tile(columns=48, burst=2)),
    "mini-down": (2048, 5120, False, Tile(columns=64, splits=4, cluster=2)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_serving_shapes_have_the_measured_tiles_and_lower_for_cuda(name):
    columns, contraction, swiglu, tile = SHAPES[name]
    assert mosaic_gpu.tile_for(128, columns, contraction, swiglu=swiglu) == tile
    for tokens in (32, 64, 128):
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in ((tokens, contraction), ((1 + swiglu) * columns, contraction))
        ]
        call = jax.jit(lambda x, w: mosaic_gpu.dense_matmul(x, w, swiglu=swiglu))
        text = call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text


@pytest.mark.parametrize("swiglu", [False, True], ids=["plain", "swiglu"])
def test_any_shape_has_a_tile_that_fits(swiglu):
    """The tile fills whole waves of the SMs; its stages and accumulators fit in an SM."""
    for columns in (16, 48, 512, 2064, 5120, 12304, 25088, 33792, 157184):
        for contraction in (64, 192, 1024, 2048, 4160, 18944):
            for tokens in (8, 24, 64, 128):
                for sms in (114, 132):
                    tile = mosaic_gpu.tile_for(tokens, columns, contraction, swiglu=swiglu, sms=sms)
                    plan = mosaic_gpu._Plan(
                        tile=tile, tokens=tokens, columns=columns, contraction=contraction,
                        halves=1 + swiglu, dtype=jnp.dtype(jnp.bfloat16),
                    )  # fmt: skip
                    assert plan.layout()[0] >= 2
                    shape = (1 + swiglu) * columns, contraction
                    mosaic_gpu._check(
                        plan, jax.ShapeDtypeStruct((tokens, contraction), jnp.bfloat16),
                        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
                    )  # fmt: skip
                    if columns <= 16 * sms:
                        assert plan.column_tiles * tile.splits <= sms
