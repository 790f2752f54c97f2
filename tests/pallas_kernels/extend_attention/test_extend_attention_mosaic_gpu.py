"""The paged attention kernel equals loops in float64 in the interpreter and lowers for CUDA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import marks

from pallas_kernels import tiles
from pallas_kernels.extend_attention import mosaic_gpu, work_items
from pallas_kernels.extend_attention.mosaic_gpu import AttentionTile
from pallas_kernels.hopper import compat

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support.attention_problems import SMALL, Problem, make_batch, oracle, run

# bfloat16 operands; probabilities and the result are rounded to 8 bits.
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


PROBLEMS = {
    # Each warpgroup works on another kv head; there are three CTAs, so that one runs several items.
    "decode_two_blocks": Problem(
        rows=((40, 16), None, (100, 16), (0, 16)), q_len=16, multiprocessors=3
    ),
    # Both warpgroups share a kv head and take turns, over several items.
    "decode_128_rows": Problem(
        rows=((40, 32), None, (100, 32)), q_len=32, heads=8, visibility="full", multiprocessors=4
    ),
    # 7 query heads a kv head and an odd number of kv heads: one warpgroup.
    "decode_group_of_7": Problem(
        rows=((3, 8), (120, 8)), q_len=8, heads=7, kv_heads=1, multiprocessors=1
    ),
    # Blocks of 4 begin inside the window of 8 tokens that one copy fetches.
    "decode_blocks_of_4": Problem(rows=((40, 4), (3, 4), None), q_len=4, block=4),
    "decode_pages_of_128": Problem(
        rows=((130, 8), None, (20, 8)), q_len=8, page=128, width=256, head_dim=128
    ),
    "split_blocks_of_4": Problem(
        rows=((40, 4), None, (170, 4)), q_len=4, block=4,
        tile=dataclasses.replace(SMALL, split_tokens=64),
    ),
    "split_24_tokens": Problem(
        rows=((150, 24), None, (30, 24)), q_len=24,
        tile=dataclasses.replace(SMALL, split_tokens=64),
    ),
    "prefill": Problem(
        rows=((40, 16), None, (100, 72), (0, 8)), padding=16, page=32,
        tile=dataclasses.replace(SMALL, persistent=False),
    ),
    "prefill_causal": Problem(
        rows=((0, 120), (37, 8)), padding=8, visibility="causal",
        tile=AttentionTile(persistent=False),
    ),
    # An item has one warpgroup and one kv head, though two would fit, and more tokens than rows.
    "windows_of_64_rows": Problem(
        rows=((40, 64), None, (8, 16), (0, 72)), padding=16, visibility="full",
        heads=2, tile=dataclasses.replace(SMALL, persistent=False, max_rows=64),
    ),
    # A canvas and the end of its context, over several items a CTA.
    "window_of_canvases": Problem(
        rows=((150, 16), None, (40, 16), (0, 16), (3, 16)), q_len=16, visibility="full", window=50,
        multiprocessors=3,
    ),
    # A row sees few keys of its first step, or none of it; both warpgroups share a kv head.
    "window_causal": Problem(
        rows=((120, 72), (37, 8), None, (0, 24)), padding=8, visibility="causal", window=70,
        heads=4, kv_heads=1, width=256, scale=1.0,
        tile=dataclasses.replace(SMALL, persistent=False),
    ),
    "window_of_few_keys": Problem(
        rows=((0, 136), (120, 8)), visibility="causal", window=5, heads=2,
        tile=dataclasses.replace(SMALL, persistent=False),
    ),
    "window_split": Problem(
        rows=((230, 24), None, (20, 24), (90, 24)), q_len=24, visibility="full", window=100,
        width=256, tile=dataclasses.replace(SMALL, split_tokens=64),
    ),
    "window_of_rows_of_any_length": Problem(
        rows=((100, 24), (3, 8), (170, 16)), padding=8, visibility="full", window=40,
        tile=dataclasses.replace(SMALL, persistent=False),
    ),
    # Two kv heads of 16 rows would fit one item, their K and V would not.
    "heads_of_256": Problem(
        rows=((70, 16), None, (3, 16)), q_len=16, visibility="full", window=60, head_dim=256,
        heads=2, kv_heads=2, width=128, tile=work_items.WIDE_HEADS,
    ),
    "heads_of_256_split": Problem(
        rows=((150, 8), (20, 8)), q_len=8, head_dim=256, heads=2, kv_heads=1,
        tile=dataclasses.replace(work_items.WIDE_HEADS, split_tokens=64),
    ),
    "prefill_blocks_of_4": Problem(
        rows=((40, 12), (3, 4), None, (0, 8)), padding=4, block=4, multiprocessors=3
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", marks.every(2, PROBLEMS))
def test_equals_loops(name, monkeypatch):
    problem = PROBLEMS[name]
    batch = make_batch(problem, seed=len(name))
    out = run(problem, batch, monkeypatch)
    np.testing.assert_allclose(out, oracle(problem, batch), **TOLERANCE)
    assert np.all(out[batch.arguments[2][-1] :] == 0)


def test_neighbours_never_change_a_rows_bits(monkeypatch):
    mine = (90, 8)
    results = []
    for index, rows in enumerate([((40, 8), mine, None), (None, mine, (170, 8))]):
        tile = dataclasses.replace(SMALL, split_tokens=64)
        problem = Problem(rows=rows, q_len=8, tile=tile)
        batch = make_batch(problem, seed=index)
        source = make_batch(dataclasses.replace(problem, rows=(mine,)), seed=5)
        batch.arguments[0][8:16] = source.arguments[0]
        batch.keys[1], batch.values[1] = source.keys[0], source.values[0]
        for column in range(-(-sum(mine) // problem.page)):
            page, source_page = (b.arguments[5][r, column] for b, r in ((batch, 1), (source, 0)))
            batch.arguments[1][page] = source.arguments[1][source_page]
        out = run(problem, batch, monkeypatch)
        np.testing.assert_allclose(out, oracle(problem, batch), **TOLERANCE)
        results.append(out[8:16])
    assert np.any(results[0] != 0)
    np.testing.assert_array_equal(results[0], results[1])


def make_plan(problem: Problem, tokens: int, **changes) -> work_items.Plan:
    spec = shapes(problem, tokens)
    options = {"visibility": problem.visibility, "block_size": problem.block, "scale": 1.0}
    options |= {"q_len": problem.q_len, "window": problem.window, "tile": problem.tile} | changes
    return mosaic_gpu.make_plan(spec[0], spec[1], spec[-1], **options)


def shapes(problem: Problem, tokens: int, dtype=jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    rows, pages = len(problem.rows), problem.width // problem.page
    pool = (rows * pages, 2, problem.kv_heads, problem.page, problem.head_dim)
    return [
        jax.ShapeDtypeStruct((tokens, problem.heads, problem.head_dim), dtype),
        jax.ShapeDtypeStruct(pool, dtype),
        ints(rows + 1),
        ints(rows),
        ints(rows),
        ints(rows, pages),
    ]


@pytest.mark.parametrize("block", [4, 32])
@pytest.mark.parametrize("q_len", [None, 96])
def test_items_cover_every_token_and_head_once(block, q_len):
    rng = np.random.default_rng(block)
    tokens = 480
    problem = Problem(rows=(None,) * 5, block=block, q_len=q_len)
    plan = make_plan(problem, tokens)

    @jax.jit
    def items_of(cu):
        arrays = work_items.lists(plan, cu, jnp.zeros(5, jnp.int32), jnp.zeros(5, jnp.int32))
        indices = jnp.arange(plan.num_items, dtype=jnp.int32)
        return jax.vmap(lambda index: work_items.item_at(plan, arrays, index))(indices)

    for _ in range(20 if q_len is None else 1):
        cuts = np.sort(rng.integers(0, tokens // block + 1, 5)) * block
        cu = np.concatenate([[0], cuts]) if q_len is None else np.arange(6) * q_len
        items = jax.tree.map(np.asarray, items_of(cu.astype(np.int32)))
        seen = np.zeros((tokens, plan.head_items), int)
        for i in np.flatnonzero(items.active):
            end = min(items.segment_end[i], items.window[i] + plan.tile_tokens)
            seen[items.start[i] : end, items.head[i]] += 1
        assert np.all(seen == 1)


def serving(rows, q_len, *, context, heads=16, kv_heads=4, page=64, block=32, **options):
    width = -(-(context + q_len) // page) * page
    return Problem(
        rows=(None,) * rows, q_len=q_len, block=block, page=page, heads=heads, kv_heads=kv_heads,
        head_dim=options.pop("head_dim", 128), width=width, tile=None, **options,
    )  # fmt: skip


SERVING = [
    *(serving(rows, 32, context=4064) for rows in (1, 4, 16, 64)),  # LLaDA2
    *(serving(rows, 32, context=512) for rows in (1, 8, 64)),
    *(
        serving(rows, 32, context=context, heads=32, kv_heads=32)  # LLaDA
        for context in (512, 4064)
        for rows in (1, 4, 16)
    ),
    serving(8, 32, context=512, heads=28, kv_heads=4, page=32),  # a group of 7
    serving(8, 4, context=508, heads=32, kv_heads=8, block=4, page=128),  # SDAR
    serving(32, 8, context=504, heads=8, kv_heads=8, block=8, head_dim=64),
    serving(8, 16, context=512, heads=32, kv_heads=1, block=16, visibility="causal"),
]
WINDOWS = [
    *(  # DiffusionGemma's layers with a window: canvases, and context in parts of whole tiles
        serving(
            rows, 256, context=4096, heads=16 // ranks, kv_heads=8 // ranks, page=256, block=256,
            head_dim=256, visibility="full", window=1024,
        )
        for rows, ranks in ((1, 1), (16, 1), (4, 8))
    ),
    serving(
        8, 64, context=4096, heads=16, kv_heads=8, page=256, block=64, head_dim=256,
        visibility="causal", window=1024,
    ),
    serving(4, 32, context=4064, visibility="full", window=512),
]  # fmt: skip
# (problem, tokens): rows of any length.
PREFILL = [
    (serving(1, 8192, context=0, heads=32, kv_heads=32), 8192),
    (serving(8, 2048, context=0), 16384),
    (serving(32, 16, context=240, block=4), 512),
    *(  # windows of one canvas: LLaDA, Dream
        (serving(1, tokens, context=128, heads=heads, kv_heads=kv_heads, visibility="full"), tokens)
        for heads, kv_heads in ((32, 32), (28, 4))
        for tokens in (64, 96, 256)
    ),
]


def lower(problem: Problem, tokens: int) -> None:
    def call(*arrays):
        return mosaic_gpu.extend_attention(
            *arrays, visibility=problem.visibility, block_size=problem.block, scale=0.1,
            q_len=problem.q_len, window=problem.window, tile=problem.tile,
        )  # fmt: skip

    lowered = jax.jit(call).trace(*shapes(problem, tokens)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("index", marks.every(4, range(len(SERVING))))
def test_decode_lowers_for_cuda(index):
    problem = SERVING[index]
    lower(problem, len(problem.rows) * problem.q_len)


@pytest.mark.parametrize("index", range(len(WINDOWS)))
@pytest.mark.parametrize("is_ragged", [False, True])
def test_windows_and_wide_heads_lower_for_cuda(index, is_ragged):
    problem = WINDOWS[index]
    tokens = len(problem.rows) * problem.q_len
    lower(dataclasses.replace(problem, q_len=None) if is_ragged else problem, tokens)


def test_a_window_bounds_the_keys_that_are_split():
    tile = AttentionTile(kv_tokens=64, split_tokens=256)
    problem = dataclasses.replace(serving(4, 32, context=4064, visibility="full"), tile=tile)
    whole, few = (make_plan(problem, 128, window=window) for window in (None, 480))
    assert whole.num_splits == 4096 // 256
    assert few.num_splits == 3  # 479 keys of the context, 32 in flight, a step's alignment


@pytest.mark.parametrize("index", marks.every(3, range(len(PREFILL))))
def test_prefill_lowers_for_cuda(index):
    problem, tokens = PREFILL[index]
    lower(dataclasses.replace(problem, q_len=None), tokens)


def test_the_combine_of_splits_lowers_for_cuda():
    tile = AttentionTile(kv_tokens=64, split_tokens=128)
    for rows, q_len in ((1, 32), (3, 4)):  # a whole tile, rows inside a window
        problem = dataclasses.replace(serving(rows, q_len, context=4064, block=4), tile=tile)
        lower(problem, rows * q_len)


def test_every_entry_of_the_table_is_lowered_above():
    plans = [make_plan(problem, len(problem.rows) * problem.q_len) for problem in SERVING]
    plans += [make_plan(dataclasses.replace(p, q_len=None), tokens) for p, tokens in PREFILL]
    used = {plan.tile for plan in plans}
    entries = tiles.entries("extend_attention")
    assert used == {AttentionTile(**entry["tile"]) for entry in entries}


@pytest.mark.parametrize(
    "facts, reason",
    [
        ({}, None),
        ({"dtype": jnp.float32}, "needs bfloat16 or float16, this is float32"),
        ({"head_dim": 256}, None),
        ({"head_dim": 256, "block_size": 4}, "heads of 256 need a block size from 8, this is 4"),
        ({"head_dim": 192}, "head_dim 64, 128 or 256, this is 192"),
        ({"head_dim": 512}, "up to 256: with 512 a thread holds 256 sums"),
        ({"page_size": 16}, "power of two from 32, this is 16"),
        ({"block_size": 12}, "power of two from 4, this is 12"),
        ({"q_heads": 6}, "multiple of kv heads, these are 6, 4"),
    ],
)
def test_refusals_say_what_is_needed(facts, reason):
    defaults = {
        "dtype": jnp.bfloat16, "head_dim": 128, "page_size": 64, "block_size": 32, "q_heads": 16,
        "kv_heads": 4,
    }  # fmt: skip
    found = mosaic_gpu.why_not(**(defaults | facts))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q_len": 24}, "q_len must be whole blocks.*q_len=24"),
        ({"tile": AttentionTile(stages=9)}, "bytes of shared memory.*stages=9"),
        (
            {"q_len": None, "tile": AttentionTile(split_tokens=64)},
            "cannot be split.*split_tokens=64",
        ),
        ({"block_size": 6}, "power of two from 4.*block_size=6"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    problem = serving(4, 32, context=512)
    with pytest.raises(ValueError, match=message):
        make_plan(problem, 128, **changes)
