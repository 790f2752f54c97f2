"""Packing of ragged windows and the compiled sizes, against loops over rows and tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.canvas.interface import Window
from jdllm.runner.canvas import packing as canvas_packing
from jdllm.scheduler.rows import canvas as canvas_rows


def window_of(low, high):
    low, high = jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32)
    none = jnp.zeros((len(low), 1), bool)
    return Window(low=low, high=high, wanted=none, is_full=none[:, 0])


@pytest.mark.parametrize("seed", range(20))
def test_every_token_of_every_window_has_one_place(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 6))
    low = rng.integers(0, 40, rows)
    high = low + rng.integers(0, 30, rows) * rng.integers(0, 2, rows)
    size = 256
    packing = canvas_packing.pack(window_of(low, high), size)

    expected, at = {}, 0
    for row in range(rows):
        for position in range(low[row], high[row]):
            expected[at + position - low[row]] = (row, position)
        at += -(-(high[row] - low[row]) // canvas_packing.SEGMENT) * canvas_packing.SEGMENT
        assert packing.cu_q_lens[row + 1] == at
    found = {
        place: (int(packing.row[place]), int(packing.positions[place]))
        for place in range(size)
        if packing.is_valid[place]
    }
    assert found == expected
    marks = rng.random(size) < 0.1
    any_of_row = [
        any(marks[place] for place, (owner, _) in expected.items() if owner == row)
        for row in range(rows)
    ]
    assert packing.any_of_row(jnp.asarray(marks)).tolist() == any_of_row


@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize("most", [8, 64, 384, 1000, 4096, 8192])
def test_sizes_ascend_hold_the_most_and_pad_little(rows, most, is_coarse):
    sizes = canvas_rows.forward_sizes(rows, most, is_coarse=is_coarse)
    grain, least = canvas_rows.GRAINS[rows > 1], canvas_rows.LEAST[rows > 1]
    assert list(sizes) == sorted(set(sizes))
    assert all(size % grain == 0 for size in sizes)
    assert most <= sizes[-1] < max(most + grain, least + 1)
    assert sizes[0] == least
    factor = 4 if is_coarse else 5 / 4 if rows == 4 else 3 / 2
    for smaller, larger in zip(sizes, sizes[1:], strict=False):
        assert larger <= max(smaller + grain, factor * smaller + grain)
