"""Counting by expert equals its formula, thread by thread.

The Mosaic GPU interpreter cannot run `lane_code`; `lane_interpreter` can.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import compat

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm
from support.lane_interpreter import bits, inlined, run_threads, signed

from pallas_kernels.grouped_matmul import expert_counts, expert_tiles
from pallas_kernels.hopper import lane_code

UNWRITTEN = 0x7FFFFFF0


@pytest.fixture
def inline(monkeypatch):
    def peer(ref, cta):
        return llvm.inline_asm(ref.type, [ref], f"peer {cta}", "=r,r")

    monkeypatch.setattr(plgpu, "inline_mgpu", inlined)
    monkeypatch.setattr(lane_code, "of_peer", peer)


def routing(tokens, choices, experts, *, is_skewed=False):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-2, experts + 2, (tokens, choices)).astype(np.int32)
    if is_skewed:
        ids[rng.random(ids.shape) < 0.7] = experts // 2
    return ids, rng.random(tokens) < 0.8


def unwritten(*sizes):
    return [np.full(size, UNWRITTEN, np.uint32) for size in sizes]


@pytest.mark.parametrize("has_valid", [False, True], ids=["all-valid", "some-valid"])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "is_skewed", "ctas"),
    [(5, 3, 4, False, 1), (200, 8, 256, True, 2), (70, 8, 600, False, 1), (300, 8, 40, True, 4)],
    ids=str,
)
def test_the_list_of_rows(tokens, choices, experts, is_skewed, ctas, has_valid, inline):
    ids, valid = routing(tokens, choices, experts, is_skewed=is_skewed)
    valid = jnp.asarray(valid) if has_valid else None
    rows = expert_tiles.most_rows(ids.size, experts)
    options = {"num_experts": experts, "rows": rows, "tile_rows": 24, "has_shared": True}
    expected, listed = expert_tiles.list_tokens(jnp.asarray(ids), valid, **options, interpret=True)
    counting = expert_tiles.counting_of_list(tokens, choices, **options_of_counting(options))
    assert counting.ctas == ctas
    operands = [bits(ids).reshape(-1), *([] if valid is None else [bits(valid)])]
    entries = rows + -(-tokens // 8) * 8
    written = unwritten(entries, ids.size, *counting.lists())

    def emit(refs, shared, scalars):
        expert_tiles.place_and_list(
            refs[: len(operands)], refs[len(operands) :], shared, *scalars, counting, rows
        )

    run_threads(
        emit,
        [*operands, *written],
        shared=counting.scratch(),
        scalars=[[cta] for cta in range(ctas)],
        warps=counting.warps,
    )
    listed = np.asarray(listed)
    np.testing.assert_array_equal(signed(written[0]), np.where(listed < 0, UNWRITTEN, listed))
    check_segments(written[1:], expected)


def options_of_counting(options):
    return {name: value for name, value in options.items() if name != "rows"}


def check_segments(written, expected):
    wanted = (expected.places, expected.starts, expected.counts, expected.tile_ends)
    for got, want in zip(written, wanted, strict=True):
        np.testing.assert_array_equal(signed(got), want)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts"),
    [(5, 3, 4), (32, 8, 256), (150, 8, 256), (100, 2, 600)],
    ids=str,
)
@pytest.mark.parametrize(("token", "block"), [(0, 0), (3, 0), (4, 1)], ids=str)
def test_the_places_of_one_token(tokens, choices, experts, token, block, inline):
    ids, valid = routing(tokens, choices, experts)
    counting = expert_counts.Counting(
        tokens=tokens, choices=choices, num_experts=experts, tile_rows=16, has_shared=True, warps=4
    )
    operands = [bits(ids).reshape(-1), bits(valid)]
    # The token's places are in shared memory on a GPU; here they can be read afterwards.
    written = unwritten(ids.size, *counting.lists(), choices)

    def emit(refs, shared, scalars):
        expert_tiles.place_token(refs[:2], refs[2:], shared, *scalars, counting)

    run_threads(
        emit, [*operands, *written], shared=counting.scratch(), scalars=[[token, block]], warps=4
    )
    places, *lists = expert_counts.reference(
        jnp.asarray(ids.reshape(-1)), jnp.asarray(valid), counting=counting
    )
    mine = np.arange(ids.size) // choices == token
    np.testing.assert_array_equal(signed(written[-1]), places[mine])
    seen = np.where(mine & (block == 0), places, UNWRITTEN)
    np.testing.assert_array_equal(signed(written[0]), seen)
    for got, want in zip(written[1:-1], lists, strict=True):
        is_first = (token, block) == (0, 0)
        np.testing.assert_array_equal(signed(got), want if is_first else UNWRITTEN)
