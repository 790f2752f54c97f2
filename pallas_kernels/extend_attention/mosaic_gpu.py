"""Attention of in-flight blocks over a paged K,V pool: the sm90 kernel and its split-KV combine.

What it computes: for every row of the batch, softmax(q k^T) v of its in-flight tokens over its
pages, with block-causal, causal or full visibility (`reference.py` computes the same with XLA).
`work_items` cuts the work into items: up to 128 folded (head, token) rows of one batch row, against
the keys that they see or against one split of these keys.

How one CTA works. It has three warpgroups. The memory warpgroup fetches queries, then K and V page
by page (one TMA box a page; the page id is a scalar from the page table) into a ring of `stages`
steps of `kv_tokens` keys. Two compute warpgroups own 64 rows each and share the ring. The tensor
cores compute the scores, the online softmax uses base-2 exponentials in registers, and the
probabilities stay in registers as the left operand of the second product. A barrier makes the two
warpgroups take turns: while one uses the tensor cores, the other computes its softmax. K and V have
separate barriers, so a step begins when K has arrived. In decode the grid is persistent: a CTA runs
items cta, 2 * ctas - 1 - cta, 2 * ctas + cta, ... and fetches the next item's queries and keys
during the last steps of the current one. In prefill each item is a CTA, and the hardware balances
their unequal lengths.

Masks. A step has no mask if all rows of the item see all of its keys. Only the last steps (the end
of a row, the diagonal of a prefill) run a second loop body that has a mask. A masked weight is
exactly 0, but 0 * NaN is NaN, so the memory warpgroup overwrites the keys past kv_len in the last
step's V with zeros before anyone reads them.

Windows. An item begins with the step of the first key that its first token sees. The steps that are
not yet in the windows of all of its tokens have the mask, too. A token may see no key of them: its
masked scores lie below the highest score that it begins with, so they have weight 0.

Few tokens. With items of 128 rows, the windows of one canvas fill few SMs. Items of 64 rows of one
head (`max_rows`) are twice as many, and each has one warpgroup that waits for no other. On an H200,
us a call in a CUDA graph, 64 rows / 128: 384 keys, 32 heads, 64 tokens 9.6 / 12.1, 96 tokens 9.3 /
11.7, 192 tokens 10.7 / 11.7, 256 tokens 11.0 / 11.7; 28 over 4 heads, 96 tokens 8.8 / 11.1, 256
tokens 9.8 / 11.0. At 384 tokens, and for four rows, 128 rows are faster (12.7 / 16.1).

Split-KV. If rows x heads do not fill the GPU, the keys of a row are cut into splits of a static
length. Each split writes its normalised output and log-sum-exp (float32); a second kernel
(`_combine_body`) adds the splits that the row really has, in order. XLA would take five launches
for this. Nothing is atomic, and a row's splits depend on its own length and on static shapes.

Bound. Decode with L tokens and G query heads a kv head has L * G FLOP a byte of K,V. With 128 rows
the two bounds of an H200 (4.3 TB/s, about 600 TFLOP/s of attention) are nearly equal. With fewer
rows HBM is the bound, with more and in prefill the tensor cores. A row of S keys moves
4 * S * kv_heads * head_dim bytes and takes 4 * L * S * q_heads * head_dim FLOP.
"""

import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.extend_attention import work_items
from pallas_kernels.extend_attention.work_items import (
    MASKED_SCORE,
    WARPGROUP_ROWS,
    WINDOW,
    AttentionTile,
    Item,
    Plan,
)
from pallas_kernels.hopper import compat

why_not, make_plan = work_items.why_not, work_items.make_plan

_LOG2_E = math.log2(math.e)
_COMBINE_COLUMNS = 16


def extend_attention(
    q: Float[Array, "T N H"],
    kv_pool: Float[Array, "P 2 K Z H"],
    cu_q_lens: Int32[Array, " R+1"],
    context_lens: Int32[Array, " R"],
    kv_lens: Int32[Array, " R"],
    page_table: Int32[Array, "R pages_per_row"],
    *,
    visibility: str,
    block_size: int,
    scale: float,
    q_len: int | None = None,
    window: int | None = None,
    tile: AttentionTile | None = None,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """Returns the attention output; `q_len` promises that every row has this number of tokens.

    `window` is that of `pallas_kernels.extend_attention`.
    `tile` defaults to the device's table. `interpret` is an InterpretGPUParams, in tests.
    """
    plan = make_plan(
        q, kv_pool, page_table, visibility=visibility, block_size=block_size, scale=scale,
        q_len=q_len, window=window, tile=tile, interpreted=interpret is not None,
    )  # fmt: skip
    if plan.padded_tokens > plan.tokens:
        q = jnp.pad(q, ((0, plan.padded_tokens - plan.tokens), (0, 0), (0, 0)))
    lists = work_items.lists(plan, cu_q_lens, context_lens, kv_lens)
    out = jax.ShapeDtypeStruct((plan.tokens, *q.shape[1:]), q.dtype)
    rows = plan.warpgroups * WARPGROUP_ROWS
    partial_rows = (plan.num_splits, plan.num_tiles, plan.head_items, rows)
    partials = [
        jax.ShapeDtypeStruct((*partial_rows, plan.head_dim), jnp.float32),
        jax.ShapeDtypeStruct(partial_rows, jnp.float32),
    ]
    attend = compat.kernel(
        functools.partial(_attention_body, plan=plan),
        out_type=[out] if plan.num_splits == 1 else partials,
        scratch_types=list(_scratch_types(plan).values()),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        # Safe: a barrier of ours orders every read and write of shared memory.
        compiler_params={"unsafe_no_auto_barriers": True, "reduction_scratch_bytes": 0},
    )
    results = attend(q, kv_pool, page_table, *lists)
    if plan.num_splits == 1:
        return results[0]
    combine = compat.kernel(
        functools.partial(_combine_body, plan=plan),
        out_type=[out],
        scratch_types=list(_combine_scratch_types(plan).values()),
        grid=(
            plan.num_items // plan.num_splits,
            plan.warpgroups,
            plan.head_dim // _COMBINE_COLUMNS,
        ),
        grid_names=("item", "warpgroup", "column"),
        interpret=interpret,
        compiler_params={"unsafe_no_auto_barriers": True, "reduction_scratch_bytes": 0},
    )
    return combine(*results, *lists)[0]


def _scratch_types(plan: Plan) -> dict[str, Any]:
    tile, D, groups = plan.tile, plan.head_dim, plan.warpgroups

    def tiled(*shape):
        return plgpu.SMEM(shape, plan.dtype, transforms=compat.tiled(64, plan.dtype))

    found = {
        "q": tiled(plan.q_buffers, groups, WARPGROUP_ROWS, D),
        "k": tiled(tile.stages, plan.streams, tile.kv_tokens, D),
        "v": tiled(tile.stages, plan.streams, tile.kv_tokens, D),
        "q_full": plgpu.Barrier(num_arrivals=len(plan.pieces), num_barriers=plan.q_buffers),
        "q_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=plan.q_buffers),
        "k_full": plgpu.Barrier(num_arrivals=plan.boxes, num_barriers=tile.stages),
        "v_full": plgpu.Barrier(num_arrivals=plan.boxes, num_barriers=tile.stages),
        "k_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=tile.stages),
        "v_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=tile.stages),
        "v_landed": plgpu.Barrier(num_arrivals=plan.boxes),
    }
    if plan.uses_turns:
        found["turn"] = plgpu.Barrier(num_arrivals=2)
    if not tile.p_in_registers:
        found["p"] = tiled(groups, WARPGROUP_ROWS, tile.kv_tokens)
    if plan.num_splits > 1:
        found["lse"] = plgpu.SMEM((groups, WARPGROUP_ROWS), jnp.float32)
    elif plan.store_tokens < WINDOW:
        found["out"] = plgpu.SMEM((groups, WARPGROUP_ROWS, D), plan.dtype)
    return found


def _attention_body(q_gmem, pool_gmem, table_gmem, *refs, plan):
    num_lists, num_outs = plan.num_lists, (1 if plan.num_splits == 1 else 2)
    lists, outs = refs[:num_lists], refs[num_lists : num_lists + num_outs]
    names = _scratch_types(plan)
    scratch = types.SimpleNamespace(**dict(zip(names, refs[num_lists + num_outs :], strict=True)))
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")

    def for_each_item(work):
        """Calls work(item, items before it, steps before it); returns both counts at the end."""

        def body(i, counts):
            items, steps = counts
            # Every second round runs backwards: so CTAs get nearly equal parts of a sorted list.
            turned = jnp.where(lax.rem(i, jnp.int32(2)) == 1, plan.ctas - 1 - cta, cta)
            item = work_items.item_at(plan, lists, i * plan.ctas + turned)

            @pl.when(item.active)
            def _():
                work(item, items, steps)

            return items + item.active.astype(jnp.int32), steps + item.high - item.low

        if plan.rounds == 1:
            item = work_items.item_at(plan, lists, cta)
            pl.when(item.active)(lambda: work(item, 0, 0))
            return item.active.astype(jnp.int32), item.high - item.low
        return lax.fori_loop(jnp.int32(0), plan.rounds, body, (jnp.int32(0), jnp.int32(0)))

    @pl.when(warpgroup == plan.warpgroups)
    def _memory():
        plgpu.set_max_registers(40, action="decrease")
        fetch = functools.partial(_fetch_item, plan, scratch, q_gmem, pool_gmem, table_gmem)
        _drain(plan, scratch, *for_each_item(fetch))

    @pl.when(warpgroup < plan.warpgroups)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        if plan.uses_turns:
            pl.when(warpgroup == 1)(lambda: _take_turn(scratch))
        for_each_item(functools.partial(_attend_item, plan, scratch, outs, warpgroup))
        if plan.uses_turns:
            pl.when(warpgroup == 0)(lambda: _take_turn(scratch))


def _take_turn(scratch) -> None:
    plgpu.barrier_arrive(scratch.turn)
    plgpu.barrier_wait(scratch.turn)


def _rem(value, divisor: int):
    """Returns value % divisor, as a Python number if it is known: an array would be captured."""
    if divisor == 1 or isinstance(value, int):
        return 0 if divisor == 1 else value % divisor
    return lax.rem(value, jnp.int32(divisor))


def _load_start(plan: Plan, item: Item):
    """Returns the first token of the boxes of q, which must end inside the array."""
    last = plan.padded_tokens - plan.tile_tokens
    return pl.multiple_of(jnp.minimum(item.window, last), WINDOW)


def _fetch_item(plan, scratch, q_gmem, pool_gmem, table_gmem, item, items, steps) -> None:
    """Does the memory warpgroup's part of an item."""
    tile, box, page = plan.tile, plan.box_tokens, plan.page
    kv_head = item.head * plan.streams
    if plan.streams == 1:
        kv_head = lax.div(item.head, jnp.int32(plan.group // plan.tile_heads))
    # Keys past kv_len repeat the row's last page: they are masked, but must be memory of the pool.
    last_page = jnp.maximum(lax.div(item.kv_len - 1, jnp.int32(page)), 0)
    buffer = _rem(items, plan.q_buffers)

    if not isinstance(items, int):

        @pl.when(items >= plan.q_buffers)
        def _():
            plgpu.barrier_wait(scratch.q_empty.at[buffer])

    first = _load_start(plan, item)
    q_head = item.head * (plan.streams * plan.tile_heads)
    for piece in plan.pieces:
        plgpu.copy_gmem_to_smem(
            q_gmem.at[pl.ds(first + piece.token, piece.tokens), q_head + piece.head],
            scratch.q.at[buffer, piece.warpgroup, pl.ds(piece.row, piece.tokens)],
            scratch.q_full.at[buffer],
        )

    def copy(step, part, page_ids, smem, barrier):
        for i, page_id in enumerate(page_ids):
            for stream in range(plan.streams):
                source = pool_gmem.at[page_id, part, kv_head + stream]
                if box != page:
                    source = source.at[pl.ds(_rem(step * tile.kv_tokens + i * box, page), box)]
                plgpu.copy_gmem_to_smem(source, smem.at[stream, pl.ds(i * box, box)], barrier)

    def fetch(step, _, *, is_last=False):
        count = steps + step - item.low
        stage = _rem(count, tile.stages)
        page_ids = []  # read before the wait, which hides their latency
        for i in range(tile.kv_tokens // box):
            index = lax.div(step * tile.kv_tokens + i * box, jnp.int32(page))
            page_id = table_gmem[item.row, jnp.minimum(index, last_page)]
            page_ids.append(jnp.clip(page_id, 0, plan.num_pages - 1))

        def wait(empty):
            @pl.when(count >= tile.stages)
            def _():
                plgpu.barrier_wait(empty.at[stage])

        wait(scratch.k_empty)
        copy(step, 0, page_ids, scratch.k.at[stage], scratch.k_full.at[stage])
        wait(scratch.v_empty)
        v_full = scratch.v_full.at[stage]
        copy(step, 1, page_ids, scratch.v.at[stage], scratch.v_landed if is_last else v_full)
        if is_last:
            plgpu.barrier_wait(scratch.v_landed)
            _clear_values(plan, scratch.v.at[stage], item.kv_len - step * tile.kv_tokens)
            for _ in range(plan.boxes):
                plgpu.barrier_arrive(v_full)
        return ()

    is_ragged = item.high * tile.kv_tokens > item.kv_len
    lax.fori_loop(item.low, item.high - is_ragged.astype(jnp.int32), fetch, ())

    @pl.when(is_ragged & (item.high > item.low))
    def _():
        fetch(item.high - 1, (), is_last=True)


def _clear_values(plan, v_smem, live) -> None:
    """Zeroes the values of the keys from `live` on: their weight is 0, but 0 * NaN is NaN."""
    layout = plgpu.Layout.WGMMA
    for first in range(0, plan.tile.kv_tokens, 64):

        @pl.when(live < first + 64)
        def _(first=first):
            key = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=layout) + first
            for stream in range(plan.streams):
                for column in range(0, plan.head_dim, 64):
                    block = v_smem.at[stream, pl.ds(first, 64), pl.ds(column, 64)]
                    values = compat.load(block, layout=layout)
                    block[...] = jnp.where(key < live, values, jnp.zeros_like(values))

    plgpu.commit_smem()


def _drain(plan, scratch, items, steps) -> None:
    """Waits for the arrivals that no load has waited for: a kernel must not end before them."""

    def drain_queries(i, _):
        plgpu.barrier_wait(scratch.q_empty.at[_rem(i, plan.q_buffers)])
        return ()

    def drain_keys(i, _):
        stage = _rem(i, plan.tile.stages)
        plgpu.barrier_wait(scratch.k_empty.at[stage])
        plgpu.barrier_wait(scratch.v_empty.at[stage])
        return ()

    lax.fori_loop(jnp.maximum(items - plan.q_buffers, 0), items, drain_queries, ())
    lax.fori_loop(jnp.maximum(steps - plan.tile.stages, 0), steps, drain_keys, ())


def _along_rows(values, columns: int):
    return lax.broadcast_in_dim(values, (WARPGROUP_ROWS, columns), [0])


def _attend_item(plan, scratch, outs, warpgroup, item, items, steps) -> None:
    """Does a compute warpgroup's part of an item: its 64 rows, from queries to output."""
    tile, D = plan.tile, plan.head_dim
    buffer = _rem(items, plan.q_buffers)
    q_smem = scratch.q.at[buffer, warpgroup]
    stream = warpgroup if plan.streams == 2 else 0
    to_base_2 = plan.scale * _LOG2_E

    def stage_of(step):
        return _rem(steps + step - item.low, tile.stages)

    def mask(step, scores):
        shape, layout = scores.shape, plgpu.Layout.WGMMA
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + step * tile.kv_tokens
        token = (row + warpgroup * WARPGROUP_ROWS) & (plan.tile_tokens - 1)
        position = item.position - item.start + _load_start(plan, item) + token
        is_visible = key < work_items.visible_end(plan, position, item.kv_len)
        if plan.window is None:
            return jnp.where(is_visible, scores, MASKED_SCORE)
        is_visible &= key >= work_items.visible_begin(plan, position, item.context)
        return jnp.where(is_visible, scores, MASKED_SCORE * max(2.0, 2.0 / to_base_2))

    def attend(step, carry, *, is_masked):
        acc, high, total = carry
        stage = stage_of(step)

        def query_keys(ref):
            plgpu.wgmma(ref, q_smem, scratch.k.at[stage, stream].T)
            if plan.uses_turns:
                _take_turn(scratch)
            return ref[...]

        scores_type = compat.ACC((WARPGROUP_ROWS, tile.kv_tokens), jnp.float32)
        scores = pl.run_scoped(query_keys, scores_type)
        plgpu.barrier_arrive(scratch.k_empty.at[stage])
        if is_masked:
            scores = mask(step, scores)
        new_high = jnp.maximum(high, scores.max(axis=1) * to_base_2)
        decay = jnp.exp2(high - new_high)
        weights = jnp.exp2(scores * to_base_2 - _along_rows(new_high, tile.kv_tokens))
        acc = acc * _along_rows(decay, D)
        total = total * decay + weights.sum(axis=1)
        weights = weights.astype(plan.dtype)
        if tile.p_in_registers:
            # The whole softmax must stay before the barriers, in this warpgroup's turn.
            acc, total, new_high, weights = lax.optimization_barrier(
                (acc, total, new_high, weights)
            )
        else:
            scratch.p.at[warpgroup][...] = weights
            plgpu.commit_smem()
        if plan.uses_turns:
            plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.v_full.at[stage])
        if plan.uses_turns:
            plgpu.barrier_wait(scratch.turn)

        def wait_for_next_keys():
            @pl.when(step + 1 < item.high)
            def _():
                plgpu.barrier_wait(scratch.k_full.at[stage_of(step + 1)])

        if tile.p_in_registers:

            def add_values(ref):
                plgpu.wgmma(ref, weights, scratch.v.at[stage, stream])
                wait_for_next_keys()

            acc = pl.run_state(add_values)(compat.ACC.init(acc))
        else:

            def values(ref):
                plgpu.wgmma(ref, scratch.p.at[warpgroup], scratch.v.at[stage, stream])
                wait_for_next_keys()
                return ref[...]

            acc = acc + pl.run_scoped(values, compat.ACC((WARPGROUP_ROWS, D), jnp.float32))
        plgpu.barrier_arrive(scratch.v_empty.at[stage])
        return acc, new_high, total

    plgpu.barrier_wait(scratch.q_full.at[buffer])

    @pl.when(item.high > item.low)
    def _():
        plgpu.barrier_wait(scratch.k_full.at[stage_of(item.low)])

    carry = _empty_state(D)
    masked, unmasked = (functools.partial(attend, is_masked=one) for one in (True, False))
    if plan.window is not None:
        carry = lax.fori_loop(item.low, item.inner, masked, carry)
    carry = lax.fori_loop(item.inner, item.whole, unmasked, carry)
    acc, high, total = lax.fori_loop(item.whole, item.high, masked, carry)
    if plan.uses_turns and plan.rounds > 1:
        plgpu.barrier_arrive(scratch.turn)  # the tensor cores are free during the stores
    total = jnp.where(total == 0, 1.0, total)  # no keys give zeros; "== 0" keeps NaN
    result = acc * _along_rows(1.0 / total, D)
    if plan.num_splits > 1:
        partial_gmem, lse_gmem = outs
        first = pl.multiple_of(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        at = (item.split, item.tile, item.head, pl.ds(first, WARPGROUP_ROWS))
        partial_gmem.at[*at][...] = result
        scratch.lse.at[warpgroup][...] = high + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.lse.at[warpgroup], lse_gmem.at[*at])
    else:
        # Nobody reads the queries of this warpgroup any more: their memory takes the output.
        out_smem = scratch.out if hasattr(scratch, "out") else scratch.q.at[buffer]
        out_smem.at[warpgroup][...] = result.astype(plan.dtype)
        plgpu.commit_smem()
        _store(plan, outs[0], out_smem, warpgroup, item, slice(0, D))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(scratch.q_empty.at[buffer])
    if plan.uses_turns and plan.rounds > 1:
        plgpu.barrier_wait(scratch.turn)


def _empty_state(columns: int):
    """Returns (sum of weights * values, highest score, sum of weights) of no keys."""
    layout = plgpu.Layout.WGMMA
    acc = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, columns), jnp.float32), layout)
    high = jnp.full((WARPGROUP_ROWS,), MASKED_SCORE, jnp.float32)
    total = jnp.zeros((WARPGROUP_ROWS,), jnp.float32)
    by_row = layout.reduce(1)
    return acc, plgpu.layout_cast(high, by_row), plgpu.layout_cast(total, by_row)


def _store(plan, out_gmem, out_smem, warpgroup, item, columns) -> None:
    """Starts the copies of a warpgroup's rows to out; it writes no token of another row."""
    first = _load_start(plan, item)
    q_head = item.head * (plan.streams * plan.tile_heads)

    def copy(piece, offset, tokens):
        plgpu.copy_smem_to_gmem(
            out_smem.at[piece.warpgroup, pl.ds(piece.row + offset, tokens)],
            out_gmem.at[pl.ds(first + piece.token + offset, tokens), q_head + piece.head, columns],
        )

    def store_pieces(pieces):
        def whole():
            for piece in pieces:
                copy(piece, 0, piece.tokens)

        def part():
            for piece in pieces:
                for offset in range(0, piece.tokens, plan.store_tokens):
                    token = first + piece.token + offset

                    @pl.when((token >= item.start) & (token < item.segment_end))
                    def _(piece=piece, offset=offset):
                        copy(piece, offset, plan.store_tokens)

        if plan.always_whole:
            whole()
        else:
            ends_inside = item.start + plan.tile_tokens <= item.segment_end
            is_whole = (first == item.start) & ends_inside
            pl.when(is_whole)(whole)
            pl.when(~is_whole)(part)

    for group in range(plan.warpgroups):
        pieces = [piece for piece in plan.pieces if piece.warpgroup == group]
        pl.when(warpgroup == group)(functools.partial(store_pieces, pieces))


def _combine_scratch_types(plan: Plan) -> dict[str, Any]:
    shape = (plan.num_splits, WARPGROUP_ROWS, _COMBINE_COLUMNS)
    return {
        "partials": plgpu.SMEM(
            shape, jnp.float32, transforms=compat.tiled(_COMBINE_COLUMNS, jnp.float32)
        ),
        "lse": plgpu.SMEM(shape[:2], jnp.float32),
        "out": plgpu.SMEM((plan.warpgroups, *shape[1:]), plan.dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=plan.num_splits),
    }


def _combine_body(partial_gmem, lse_gmem, *refs, plan):
    """Adds the splits of 64 rows and 16 columns of an item."""
    lists, (out_gmem, *scratch) = refs[: plan.num_lists], refs[plan.num_lists :]
    scratch = types.SimpleNamespace(**dict(zip(_combine_scratch_types(plan), scratch, strict=True)))
    warpgroup = lax.axis_index("warpgroup")
    item = work_items.item_at(plan, lists, lax.axis_index("item") * plan.num_splits)
    rows = pl.ds(pl.multiple_of(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)
    first_column = pl.multiple_of(lax.axis_index("column") * _COMBINE_COLUMNS, _COMBINE_COLUMNS)
    columns = pl.ds(first_column, _COMBINE_COLUMNS)
    count = lax.div(item.keys + (plan.split_tokens - 1), jnp.int32(plan.split_tokens))

    def fetch(split, _):
        at = (split, item.tile, item.head, rows)
        full = scratch.full.at[split]
        plgpu.copy_gmem_to_smem(partial_gmem.at[*at, columns], scratch.partials.at[split], full)
        plgpu.copy_gmem_to_smem(lse_gmem.at[*at], scratch.lse.at[split], full)
        return ()

    def add(split, carry):
        acc, high, total = carry
        plgpu.barrier_wait(scratch.full.at[split])
        lse = compat.load(scratch.lse.at[split], layout=plgpu.Layout.WGMMA.reduce(1))
        partial = compat.load(scratch.partials.at[split], layout=plgpu.Layout.WGMMA)
        new_high = jnp.maximum(high, lse)
        decay, weight = jnp.exp2(high - new_high), jnp.exp2(lse - new_high)
        acc = acc * _along_rows(decay, _COMBINE_COLUMNS)
        acc = acc + partial * _along_rows(weight, _COMBINE_COLUMNS)
        return acc, new_high, total * decay + weight

    @pl.when(item.start < item.segment_end)
    def _():
        lax.fori_loop(0, count, fetch, ())
        acc, _, total = lax.fori_loop(0, count, add, _empty_state(_COMBINE_COLUMNS))
        total = jnp.where(total == 0, 1.0, total)
        acc = acc * _along_rows(1.0 / total, _COMBINE_COLUMNS)
        scratch.out.at[warpgroup][...] = acc.astype(plan.dtype)
        plgpu.commit_smem()
        _store(plan, out_gmem, scratch.out, warpgroup, item, columns)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
