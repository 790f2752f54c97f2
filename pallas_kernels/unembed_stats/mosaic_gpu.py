"""Vocabulary statistics for sm90: x @ w.T tile by tile, reduced before it leaves the registers.

What it does. `x [T, D]` are hidden states, `w [V, D]` is the unembedding. Rows come in groups; for
one group after the other, each persistent CTA goes through its share of the vocabulary tiles. A
tile's logits are a wgmma accumulator; the epilogue folds them into running statistics and drops
them. At the end of a group every CTA writes one partial per row (`PartialStats`), and XLA merges
the partials of a row: at most one per CTA, whatever V is. With `num_rows` only the groups of the
first `num_rows` rows are computed: the time falls in steps of a group, and for 0 rows nothing is
read.

Tiling. There are two compute warpgroups of 64 rows x `columns` ids, and one memory warpgroup with a
ring of `stages` TMA buffers of 64 hidden columns. The accumulator is [tokens, ids]: in wgmma's
layout a thread then owns two rows and every fourth pair of columns. So all running statistics of a
thread are a few registers (arrays [64, 8] below: 8 slots a row, one per residue of the id modulo
8), and they are updated element by element, without any exchange between threads. Slots are reduced
once, when a group ends. Up to 64 tokens the warpgroups take different ids of the same rows
(`split="columns"`), above that different rows of the same ids. With `pair`, the two CTAs of a
cluster take neighbouring blocks of rows, and each loads half of the w tile for both (TMA
multicast): without that, a 128 x 256 tile would ask L2 for 9 TB/s. All CTAs have nearly the same
number of columns, so their last tiles are as full as the others. The ring does not stop between
groups: the first loads of the next group arrive during the last epilogue. The whole GPU works on
`teams` groups at a time, one by default: with fewer teams w is read more often, with more some of
the GPU is idle when few groups are left.

The epilogue costs about 13 instructions a logit: 8 for the two best with their ids, one exp and 4
for the two sums. A tile that holds a forbidden or given id, or that ends past V, runs a second
version with masks. Which tiles these are is known before the loop (`flags`), and the version never
changes a bit.

Bound. V * D * 2 bytes of weights, read once per group (x comes from L2), and 2 * T * V * D FLOP. On
an H200 the bytes are the bound up to about 200 tokens, the tensor cores above. The epilogue does
not overlap with the tensor cores of its own CTA: it takes about a tenth of the time from 256 tokens
on.

The tiles of a CTA and their order depend on static shapes only, and a row's numbers depend on its
own hidden state only: neighbours, padding, NaN in another row, the row's place and `num_rows`
change no bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels import dispatch, tiles
from pallas_kernels.hopper import compat, register_code
from pallas_kernels.hopper import ring as rings
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.unembed_stats import partials
from pallas_kernels.unembed_stats.partials import LOWEST, PartialStats
from pallas_kernels.unembed_stats.plan import DEPTH, ROWS, WARPGROUPS, Plan, UnembedTile

SLOTS = 8  # columns after which the accumulator layout repeats
NOISE_COLUMNS = 32  # columns whose noise is written as one array: fewer operations to lower
MAX_FORBIDDEN = 16  # in a tile with forbidden ids, each costs two instructions a logit

# Fields of a partial in the order of the kernel's outputs.
_FLOATS = ("high", "total", "moment", "best_logit", "second_logit", "given_logit")
_IDS = ("best_id", "second_id")
_DRAWN_FLOATS = ("drawn_score", "drawn_logit")
_DRAWN_IDS = ("drawn_id",)

_ROW_DTYPES = {
    "given_ids": jnp.int32,
    "draw_first": jnp.uint32,
    "draw_second": jnp.uint32,
    "inverse_temperature": jnp.float32,
}


def why_not(*, dtype: DTypeLike, hidden_size: int, num_forbidden: int = 0) -> str | None:
    """Returns why this kernel cannot serve the shape, or None."""
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if hidden_size % DEPTH:
        return f"needs a hidden size that {DEPTH} divides, this is {hidden_size}"
    if num_forbidden > MAX_FORBIDDEN:
        return f"takes up to {MAX_FORBIDDEN} forbidden ids, these are {num_forbidden}"
    return None


def table_tile(T: int, *, draws: bool) -> UnembedTile:
    """Returns the tuned tile for T rows."""
    return UnembedTile(**tiles.lookup("unembed_stats", tokens=T, draws=int(draws)))


def partial_stats(
    x: Float[Array, "T D"],
    w: Float[Array, "V D"],
    rows: Mapping[str, Num[Array, " T"]],
    *,
    forbidden_ids: tuple[int, ...] = (),
    num_rows: Int32[Array, ""] | None = None,
    first_id: Int32[Array, ""] | None = None,
    tile: UnembedTile | None = None,
    interpret: Any = None,
) -> PartialStats:
    """Returns the merged statistics of x @ w.T; `rows` may hold the keys of `_ROW_DTYPES`.

    `draw_first`, `draw_second` and `inverse_temperature` come together or not at all. Results from
    row `num_rows` on are arbitrary, also NaN: if a group is not computed, they are what was in
    memory. `first_id` is the id of the first row of a `w` that is a part of the vocabulary;
    forbidden and given ids may then lie in other parts, and a part may have only forbidden ids.
    """
    (T, D), V = x.shape, w.shape[0]
    if reason := why_not(dtype=x.dtype, hidden_size=D, num_forbidden=len(forbidden_ids)):
        raise ValueError(f"unembed_stats: mosaic_gpu {reason}: x {x.shape}, w {w.shape}")
    names = tuple(name for name in _ROW_DTYPES if name in rows)
    plan = Plan(
        tile=tile or table_tile(T, draws="draw_first" in rows),
        T=T, V=V, D=D, dtype=jnp.dtype(x.dtype), forbidden_ids=forbidden_ids, row_names=names,
        has_num_rows=num_rows is not None, is_part=first_id is not None,
    )  # fmt: skip
    rows = {name: rows[name].astype(_ROW_DTYPES[name]) for name in names}
    if first_id is not None:
        rows = _as_whole(rows, first_id)
    padded = {name: _pad(plan, name, rows[name]) for name in names}
    inputs = [padded[name] for name in names]
    if plan.has_flags:
        inputs.insert(0, _flags(plan, padded.get("given_ids"), first_id))
    if first_id is not None:
        inputs.insert(0, first_id.reshape(1))
    if num_rows is not None:
        inputs.insert(0, num_rows.astype(jnp.int32).reshape(1))
    floats, ids = _fields(plan)
    if T % 8:  # a TMA box of 8 rows must not be taller than its array
        x = jnp.pad(x, ((0, -T % 8), (0, 0)))
    outputs = dict(zip(floats + ids, _kernel(plan, interpret)(x, w, *inputs), strict=True))
    absent = dict.fromkeys(() if plan.draws else (*_DRAWN_FLOATS, *_DRAWN_IDS))
    merged = partials.merge_all(PartialStats(**outputs, **absent))
    if first_id is not None:
        ids = {name: getattr(merged, name) + first_id for name in ids}
        merged = dataclasses.replace(merged, **ids)
    return jax.tree.map(lambda a: a[:T], merged)


def _as_whole(rows: Mapping[str, jax.Array], first_id: jax.Array) -> dict[str, jax.Array]:
    """Returns the inputs with which ids counted from `first_id` on mean those of the vocabulary."""
    rows = dict(rows)
    if "given_ids" in rows:
        rows["given_ids"] = rows["given_ids"] - first_id
    if "draw_first" in rows:  # the counter is linear in the id
        rows["draw_first"] = partials.draw_counter(rows["draw_first"], first_id)
    return rows


def _fields(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if plan.draws:
        return _FLOATS + _DRAWN_FLOATS, _IDS + _DRAWN_IDS
    return _FLOATS, _IDS


def _masked_tiles(plan: Plan) -> tuple[int, ...]:
    """Returns the tiles that need masks for any rows, as far as shapes and options tell."""
    found = set() if plan.is_part else {i // plan.tile_columns for i in plan.forbidden_ids}
    if plan.V % plan.tile_columns:
        found.add(plan.num_tiles - 1)
    return tuple(sorted(found))


def _pad(plan: Plan, name: str, values: jax.Array) -> jax.Array:
    absent = -1 if name == "given_ids" else 0
    return jnp.pad(values, (0, plan.padded_rows - plan.T), constant_values=absent)


def _flags(plan: Plan, given_ids: jax.Array | None, first_id: jax.Array | None) -> jax.Array:
    """Returns int32 [blocks of 64 rows, tiles]: 1 where a tile needs masks for the block."""
    index = jnp.arange(plan.num_tiles, dtype=jnp.int32)[:, None]
    begin = index * plan.tile_columns
    if given_ids is None:
        given_ids = jnp.full((plan.padded_rows,), -1, jnp.int32)
    ids = given_ids.reshape(-1, 1, ROWS)
    if first_id is not None and plan.forbidden_ids:
        forbidden = jnp.array(plan.forbidden_ids, jnp.int32) - first_id
        forbidden = jnp.broadcast_to(forbidden, (ids.shape[0], 1, forbidden.size))
        ids = jnp.concatenate([ids, forbidden], axis=2)
    found = (begin <= ids) & (ids < begin + plan.tile_columns)
    masked = functools.reduce(jnp.logical_or, (index == i for i in _masked_tiles(plan)), found)
    return masked.astype(jnp.int32).max(axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _RowInputs:
    """Per-row inputs of a warpgroup, [ROWS] except the given ids; None where absent."""

    given_ids: jax.Array | None = None  # [ROWS, SLOTS]
    draw_first: jax.Array | None = None
    draw_second: jax.Array | None = None
    inverse_temperature: jax.Array | None = None


def _kernel(plan: Plan, interpret: Any) -> Callable[..., Any]:
    """Returns the kernel, a function of x, w and the inputs; it returns the partials' fields."""
    tile, columns, stages = plan.tile, plan.columns, plan.tile.stages
    floats, ids = _fields(plan)

    def body(x_gmem, w_gmem, *refs):
        num_rows_gmem, *refs = refs if plan.has_num_rows else (None, *refs)
        first_id_gmem, *refs = refs if plan.is_part else (None, *refs)
        flags_gmem, *refs = refs if plan.has_flags else (None, *refs)
        rows_gmem, refs = refs[: len(plan.row_names)], refs[len(plan.row_names) :]
        outs, refs = refs[: len(floats) + len(ids)], refs[len(floats) + len(ids) :]
        x_smem, w_smem, full, empty = refs
        ring = Ring(stages=stages, full=full, empty=empty)

        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("worker")
        team = lax.axis_index("team")
        my_groups = plan.groups
        if num_rows_gmem is not None:
            wanted = lax.max(lax.min(num_rows_gmem[0], jnp.int32(plan.T)), jnp.int32(0))
            my_groups = lax.div(wanted + (plan.group_rows - 1), jnp.int32(plan.group_rows))
        if plan.teams > 1:
            my_groups = lax.div(my_groups - team + (plan.teams - 1), jnp.int32(plan.teams))
        my_tiles = lax.div(jnp.int32(plan.num_tiles - 1) - worker, jnp.int32(plan.workers)) + 1
        # Stages are counted over all groups of the CTA: the ring does not stop between two.
        group_steps = my_tiles * plan.depth_steps

        def first_row_of(visit):
            first_row = (team + visit * plan.teams) * plan.group_rows
            return first_row + (lax.axis_index("cta") * plan.cta_rows if tile.pair else 0)

        def load():
            plgpu.set_max_registers(40, action="decrease")

            def load_group(visit, _):
                base, first_row = visit * group_steps, first_row_of(visit)
                next_stage = functools.partial(load_stage, base=base, first_row=first_row)
                return lax.fori_loop(0, group_steps, next_stage, ())

            def load_stage(group_step, _, *, base, first_row):
                step = base + group_step
                stage = ring.stage_of(step)
                turn = lax.div(group_step, jnp.int32(plan.depth_steps))
                depth = lax.rem(group_step, jnp.int32(plan.depth_steps)) * DEPTH

                ring.wait_until_empty(step)
                first_id = (worker + turn * plan.workers) * plan.tile_columns
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[pl.ds(first_row, plan.cta_rows), pl.ds(depth, DEPTH)],
                    x_smem.at[stage],
                    full.at[stage],
                )
                plgpu.copy_gmem_to_smem(
                    w_gmem.at[pl.ds(first_id, plan.tile_columns), pl.ds(depth, DEPTH)],
                    w_smem.at[stage],
                    full.at[stage],
                    collective_axes="cta" if tile.pair else None,
                )
                return ()

            lax.fori_loop(0, my_groups, load_group, ())
            ring.drain(my_groups * group_steps)

        def update(masked, *given):
            """Returns the statistics after a tile; the interpreter runs the plain function."""
            function = functools.partial(_update, plan, masked)
            return register_code.inline(function, *given) if interpret is None else function(*given)

        def compute():
            plgpu.set_max_registers(232, action="increase")
            by_rows = tile.split == "rows"
            my_columns = jnp.int32(0) if by_rows else warpgroup * columns
            slots = plgpu.broadcasted_iota(jnp.int32, (ROWS, SLOTS), 1, layout=plgpu.Layout.WGMMA)

            # What ids of the options are counted from.
            origin = jnp.int32(0) if first_id_gmem is None else first_id_gmem[0]

            def one_group(visit, _):
                my_row = first_row_of(visit) + (warpgroup * ROWS if by_rows else 0)
                base, inputs = visit * group_steps, load_rows(my_row)
                next_tile = functools.partial(one_tile, base=base, my_row=my_row, inputs=inputs)
                state = lax.fori_loop(0, my_tiles, next_tile, _start(plan))
                store(_reduce_slots(plan, state, slots), my_row)
                return ()

            def accumulate(acc, base):
                def one_stage(k, _):
                    stage = ring.stage_of(base + k)
                    x_tile, w_tile = x_smem.at[stage], w_smem.at[stage]
                    if by_rows:
                        x_tile = x_tile.at[pl.ds(warpgroup * ROWS, ROWS)]
                    else:
                        w_tile = w_tile.at[pl.ds(warpgroup * columns, columns)]
                    plgpu.barrier_wait(full.at[stage])
                    plgpu.wgmma(acc, x_tile, w_tile.T)
                    # This wgmma stays in flight; the one before has read its stage.
                    plgpu.wgmma_wait(1)

                    pl.when(k > 0)(lambda: ring.release(base + k - 1))
                    return ()

                lax.fori_loop(0, plan.depth_steps, one_stage, ())
                plgpu.wgmma_wait(0)
                ring.release(base + plan.depth_steps - 1)
                return acc[...]

            def one_tile(turn, state, *, base, my_row, inputs):
                index = worker + turn * plan.workers
                if flags_gmem is not None:
                    masked = flags_gmem[lax.div(my_row, ROWS), index] != 0
                else:
                    masked = index < 0
                    for masked_tile in _masked_tiles(plan):
                        masked |= index == masked_tile
                logits = pl.run_scoped(
                    functools.partial(accumulate, base=base + turn * plan.depth_steps),
                    compat.ACC((ROWS, columns), jnp.float32),
                )
                first_id = index * plan.tile_columns + my_columns
                given = (inputs, slots, first_id, origin, logits, state)
                return lax.cond(
                    masked,
                    functools.partial(update, True),
                    functools.partial(update, False),
                    *given,
                )

            lax.fori_loop(0, my_groups, one_group, ())

        def load_rows(my_row) -> _RowInputs:
            # Only two words a thread: shared memory would not help.
            found = {
                name: compat.load(
                    source.at[pl.ds(my_row, ROWS)],
                    layout=plgpu.Layout.WGMMA.reduce(1),
                    optimized=False,
                )
                for name, source in zip(plan.row_names, rows_gmem, strict=True)
            }
            if "given_ids" in found:
                found["given_ids"] = _wide(found["given_ids"])
            return _RowInputs(**found)

        def store(fields: dict[str, jax.Array], my_row):
            part = worker * plan.accumulators
            if plan.accumulators > 1:
                part += warpgroup
            for name, out in zip((*floats, *ids), outs, strict=True):
                # One word a row, in the order of the merge: a few kilobytes a group.
                compat.store_narrow(out.at[pl.ds(my_row, ROWS), part], fields[name])

        # One branch per role: ptxas honours set_max_registers in no other form.
        lax.cond(warpgroup == WARPGROUPS, load, compute)

    swizzled = compat.tiled(DEPTH, plan.dtype)
    scratch = [
        plgpu.SMEM((stages, plan.cta_rows, DEPTH), plan.dtype, transforms=swizzled),
        plgpu.SMEM((stages, plan.tile_columns, DEPTH), plan.dtype, transforms=swizzled),
        *rings.barriers(
            stages, copies=2, readers=WARPGROUPS, shared_along=("cta",) if tile.pair else ()
        ),
    ]
    shape = (plan.padded_rows, plan.parts)
    return compat.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for _ in floats]
        + [jax.ShapeDtypeStruct(shape, jnp.int32) for _ in ids],
        scratch_types=scratch,
        grid=(plan.teams, plan.workers),
        grid_names=("team", "worker"),
        cluster=(2,) if tile.pair else (),
        cluster_names=("cta",) if tile.pair else (),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        # Safe: no thread reads shared memory that it writes, and nothing is overwritten after a
        # commit_smem.
        compiler_params={"unsafe_no_auto_barriers": True},
        interpret=interpret,
    )


def _wide(values: jax.Array) -> jax.Array:
    """Returns values [ROWS] repeated for each slot."""
    return lax.broadcast_in_dim(values, (ROWS, SLOTS), [0])


def _start(plan: Plan) -> dict[str, jax.Array]:
    floats, ids = _fields(plan)

    def full(value, dtype):
        return plgpu.layout_cast(jnp.full((ROWS, SLOTS), value, dtype), plgpu.Layout.WGMMA)

    sums = ("total", "moment", "given_logit", "drawn_logit")
    return {name: full(0.0 if name in sums else LOWEST, jnp.float32) for name in floats} | {
        name: full(0, jnp.int32) for name in ids
    }


def _update(
    plan: Plan,
    masked: bool,
    inputs: _RowInputs,
    slots: jax.Array,
    first_id: jax.Array,
    origin: jax.Array,
    logits: jax.Array,  # [ROWS, columns]
    state: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Returns the running statistics after one tile; they hold ids without their slot.

    Ids are counted from the first row of w; the id of that row is `origin`, also in a part.

    There are two passes over the accumulator: the first finds the best ids and so the maximum, the
    second sums the exponentials.
    """
    state = dict(state)
    high = state["high"]

    def chunk_of(c: int) -> jax.Array:
        chunk = logits[:, c : c + SLOTS]
        return jnp.where(first_id + c + slots < plan.V, chunk, LOWEST) if masked else chunk

    for c in range(0, logits.shape[1], SLOTS):
        chunk = candidates = chunk_of(c)
        base = lax.broadcast(first_id + c, chunk.shape)
        if masked:
            ids = base + slots
            for forbidden in plan.forbidden_ids:
                place = forbidden - origin if plan.is_part else forbidden
                candidates = jnp.where(ids == place, LOWEST, candidates)
            if plan.forbidden_ids:
                high = jnp.maximum(high, chunk)
            if inputs.given_ids is not None:
                # Past V a raw logit is 0: TMA fills with zeros.
                raw = logits[:, c : c + SLOTS]
                state["given_logit"] += jnp.where(ids == inputs.given_ids, raw, 0.0)
        best, second = state["best_logit"], state["second_logit"]
        is_best, is_second = candidates > best, candidates > second
        lower = lax.select(is_second, base, state["second_id"])
        state["second_id"] = lax.select(is_best, state["best_id"], lower)
        state["best_id"] = lax.select(is_best, base, state["best_id"])
        state["second_logit"] = jnp.maximum(second, jnp.minimum(best, candidates))
        state["best_logit"] = jnp.maximum(best, candidates)
        if plan.draws:
            if c % NOISE_COLUMNS == 0:
                scores = _scores(inputs, first_id + c, logits[:, c : c + NOISE_COLUMNS])
            score = scores[:, c % NOISE_COLUMNS : c % NOISE_COLUMNS + SLOTS]
            if masked:
                score = jnp.where(candidates == LOWEST, LOWEST, score)
            drawn = score > state["drawn_score"]
            state["drawn_id"] = lax.select(drawn, base, state["drawn_id"])
            state["drawn_logit"] = lax.select(drawn, candidates, state["drawn_logit"])
            state["drawn_score"] = lax.select(drawn, score, state["drawn_score"])

    high = jnp.maximum(high, state["best_logit"])
    shift = state["high"] - high
    scale = jnp.exp(shift)
    moment = scale * (state["moment"] + shift * state["total"])
    total = scale * state["total"]
    for c in range(0, logits.shape[1], SLOTS):
        below = chunk_of(c) - high
        weight = jnp.exp(below)
        total = total + weight
        moment = moment + weight * below
    return state | {"high": high, "total": total, "moment": moment}


def _scores(inputs: _RowInputs, first_id: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns logit / temperature + noise for some columns."""

    def along(values: jax.Array | None) -> jax.Array:
        assert values is not None, "a draw has all of its inputs"
        return lax.broadcast_in_dim(values, logits.shape, [0])

    ids = first_id + plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
    counter = partials.draw_counter(along(inputs.draw_first), ids)
    noise = partials.noise(counter, along(inputs.draw_second))
    return logits * along(inputs.inverse_temperature) + noise


def _reduce_slots(
    plan: Plan, state: dict[str, jax.Array], slots: jax.Array
) -> dict[str, jax.Array]:
    """Returns [ROWS] statistics: the merge of `partials.py` over the eight slots of a row."""

    def lowest_id(ids: jax.Array, where: jax.Array) -> jax.Array:
        return -jnp.where(where, -ids, jnp.int32(-partials.NO_ID)).max(1)

    high = state["high"].max(1)
    shift = state["high"] - _wide(high)
    scale = jnp.exp(shift)
    best_ids, second_ids = state["best_id"] + slots, state["second_id"] + slots
    best = state["best_logit"].max(1)
    best_id = lowest_id(best_ids, state["best_logit"] == _wide(best))
    # In the slot of the best id, the second best is the candidate for second.
    is_best = best_ids == _wide(best_id)
    rest = jnp.where(is_best, state["second_logit"], state["best_logit"])
    rest_ids = jnp.where(is_best, second_ids, best_ids)
    second = rest.max(1)
    fields = {
        "high": high,
        "total": (scale * state["total"]).sum(1),
        "moment": (scale * (state["moment"] + shift * state["total"])).sum(1),
        "best_logit": best,
        "best_id": best_id,
        "second_logit": second,
        "second_id": lowest_id(rest_ids, rest == _wide(second)),
        "given_logit": state["given_logit"].sum(1),
    }
    if plan.draws:
        score = state["drawn_score"].max(1)
        drawn_ids = state["drawn_id"] + slots
        drawn_id = lowest_id(drawn_ids, state["drawn_score"] == _wide(score))
        mine = drawn_ids == _wide(drawn_id)
        fields |= {
            "drawn_score": score,
            "drawn_id": drawn_id,
            "drawn_logit": jnp.where(mine, state["drawn_logit"], -math.inf).max(1),
        }
    return fields
