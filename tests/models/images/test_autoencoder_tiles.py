"""Decoding in tiles gives the picture that decoding the whole gives: no seams, less memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_autoencoder

from jdllm.models.images.autoencoder import layers, tiles

SEAM = 2  # how much steeper a difference is at borders than elsewhere
ATOL = 5e-5  # the goldens' tolerance for decoded images
campaign = pytest.mark.campaign


@pytest.fixture(scope="module")
def vae():
    return tiny_autoencoder.model()


@pytest.fixture(scope="module")
def decode(vae):
    return jax.jit(vae.decode, static_argnames="tile")


def smooth_latents(batch, height, width):
    """Returns sums of a few waves, with a slope, so that the corners differ."""
    rng = np.random.RandomState(height)
    y, x = np.mgrid[:height, :width] / 10
    waves = rng.uniform(-1, 1, (4, batch, 16, 2, 1, 1))
    field = sum(np.sin(wave[:, :, 0] * y + wave[:, :, 1] * x + i) for i, wave in enumerate(waves))
    slope = rng.uniform(-1, 1, (2, batch, 16, 1, 1))
    return jnp.asarray((field + slope[0] * y + slope[1] * x) / 2, jnp.float32)


@pytest.mark.parametrize(
    ("batch", "height", "width", "tile"),
    [
        pytest.param(2, 16, 12, 64, marks=campaign),  # 2 x 2 tiles of the last block
        # Sides that tiles do not divide, three blocks in tiles.
        pytest.param(1, 17, 11, 32, marks=campaign),
        (1, 4, 25, 64),  # tiles in a row, larger than the picture is high
    ],
)
def test_tiles_give_the_whole_picture(decode, batch, height, width, tile):
    latents = smooth_latents(batch, height, width)
    whole, tiled = decode(latents), decode(latents, tile=tile)
    assert np.std(whole) > 0.3
    np.testing.assert_allclose(tiled, whole, atol=ATOL)


def excess_at(image, other, columns):
    """Returns how much steeper image - other is across these columns than elsewhere."""
    steps = np.abs(np.diff(image - other, axis=2)).mean((0, 1, 3))
    elsewhere = np.delete(steps, [c - 1 for c in columns])
    return steps[[c - 1 for c in columns]].mean() / (elsewhere.mean() + 1e-6)


def test_there_are_no_seams(decode):
    latents = smooth_latents(1, 8, 24)
    whole, tiled = decode(latents), decode(latents, tile=64)
    borders = [64, 128]
    plain = np.concatenate([decode(part) for part in np.split(latents, 3, axis=3)], axis=2)
    # What the measure is for: tiles with moments of their own do not fit together.
    assert np.abs(plain - whole).max() > 0.1
    assert excess_at(plain, whole, borders) > SEAM
    assert np.abs(tiled - whole).max() < ATOL
    assert excess_at(np.asarray(tiled), np.asarray(whole), borders) < SEAM
    # Each picture is as steep across the borders as the whole one.
    steps = [np.abs(np.diff(x, axis=2)).mean((0, 1, 3))[[63, 127]] for x in (whole, tiled)]
    np.testing.assert_allclose(steps[1], steps[0], rtol=1e-3)


@campaign
def test_memory_is_bounded_by_the_tile():
    # Without the attention, whose logits are most of what so narrow a model needs.
    hf = {**tiny_autoencoder.HF, "mid_block_add_attention": False}
    vae = tiny_autoencoder.model(hf, tiny_autoencoder.random_tensors(hf))
    latents = jax.ShapeDtypeStruct((1, 16, 64, 64), jnp.float32)

    def temporary_bytes(tile):
        compiled = jax.jit(lambda z: vae.decode(z, tile=tile)).lower(latents).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(64) < temporary_bytes(512) / 3


def test_moments_of_parts_pool_to_those_of_the_whole():
    rng = np.random.RandomState(0)
    x = jnp.asarray(rng.standard_normal((2, 6, 4, 4)) * [1, 2, 3, 4] + 7, jnp.float32)
    norm = layers.GroupNorm(4, 2, jnp.dtype(jnp.float32))
    masks = [(jnp.arange(6) < 2), (jnp.arange(6) >= 2)]
    parts = [norm.moments(x, jnp.tile(mask[:, None] * 1.0, (1, 4))) for mask in masks]
    pooled = jax.tree.map(lambda *each: jnp.stack(each), *parts).pooled()
    whole = norm.moments(x)
    np.testing.assert_allclose(pooled.mean, whole.mean, rtol=1e-5)
    np.testing.assert_allclose(pooled.variance, whole.variance, rtol=1e-5)
    assert pooled.positions == 24


@pytest.mark.parametrize("size", [(5, 9), (16, 16), (1, 33)])
@pytest.mark.parametrize("largest", [2, 4, 10])
def test_each_position_is_counted_once(size, largest):
    grid = tiles.Grid(size=size, largest=largest, margin=3)
    seen = np.zeros([2 * side for side in size], int)
    for place in np.ndindex(grid.count):
        assert all(2 * side <= largest for side in grid.tile)
        at = tuple(map(jnp.asarray, place))
        inside, counted = map(np.asarray, grid.masks(at))
        y, x = (2 * (int(begin) - grid.margin) for begin in grid.begins(at))
        for row, column in np.ndindex(inside.shape):
            in_picture = 0 <= row + y < len(seen) and 0 <= column + x < seen.shape[1]
            assert inside[row, column] == in_picture
            if counted[row, column]:
                seen[row + y, column + x] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("tile", [0, 1, 63, -2])
def test_a_tile_that_is_no_even_number_is_refused(vae, tile):
    with pytest.raises(ValueError, match=f"tile={tile}"):
        vae.decode(jnp.zeros((1, 16, 2, 2)), tile=tile)
