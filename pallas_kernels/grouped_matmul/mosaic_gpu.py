"""Experts of a mixture-of-experts layer on Hopper: two fused matmuls over rows grouped by expert.

There are four launches: `spread` counts the (token, choice) pairs and copies each token to the rows
of its experts (`expert_tiles`), then `gate_up` and `down` below, then `combine` sums a token's
rows.

For many tokens gate_up gathers its token rows itself (`Tile.gathers`): `list_tokens` replaces
`spread`, and cp.async by the memory warpgroup (`row_gather`) replaces TMA of the rows.

Both matmuls are one persistent kernel with the operands swapped: a tile's accumulator is [128
weight rows per warpgroup, N token rows]. The weights are operand A; the transposed token rows are
B. So the token rows are the narrow side of a wgmma, which may be any multiple of 8: an expert with
3 tokens costs 8 columns, not 64 rows. A work item is (expert, tile of N rows of its segment, tile
of weight rows). Weight tiles of one expert follow one another, so that its token rows are read from
L2. One warpgroup issues TMA loads of weights and rows into a ring of stages, one or two warpgroups
compute. There is no list of items: a warpgroup finds an item's expert by binary search in the
cumulated tile counts, which costs less than the XLA launches it replaces.

gate_up: the interleaved storage puts 64 gate rows before their 64 up rows. So a warpgroup's
accumulator holds gate and up of the same 64 hidden columns: activation(gate) * up in float32,
rounded once. down: writes its product, rounded once; `combine` applies the weights. Both store the
transposed accumulator through shared memory. Only an expert's own rows (up to a multiple of 8) are
stored, in pieces of a power of two.

A row's bits depend on its own values alone: the order of K is fixed, tiles are static, columns of a
wgmma do not mix, and rows between segments, whatever they hold, are columns that nobody reads.

Bound: reading the weights of the used experts once, 6.3 MB each for LLaDA2-mini (hidden 2048,
expert width 512). Streaming reaches 4.4 TB/s (H200). From about 2048 tokens the rows written and
read between the launches add a fifth; from about 8192 tokens the tensor cores are the bound.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import device, dispatch, tiles
from pallas_kernels.grouped_matmul import expert_tiles, row_gather
from pallas_kernels.grouped_matmul.reference import Activation
from pallas_kernels.hopper import compat, limits
from pallas_kernels.hopper import ring as rings
from pallas_kernels.hopper.ring import Ring

_WEIGHT_ROWS = 128  # of a compute warpgroup
_CHUNK = 64  # output columns that are stored at once; the gate_up interleaving
# GELU's approximation by a tanh is a sigmoid's: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 * u)).
_GELU_SLOPE, _GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile parameters of both matmuls; a problem whose sizes do not divide gets a smaller tile."""

    rows: int  # token rows N of a tile: a multiple of 8, at most 256
    warpgroups: int  # compute warpgroups, 128 weight rows each
    block_k: int  # K columns of a stage: a multiple of 64
    stages: int
    gathers: bool = False  # gate_up reads the rows of x itself, not copies of them

    def __post_init__(self):
        if self.rows % 8 or not 8 <= self.rows <= 256 or self.block_k % 64 or self.stages < 2:
            raise ValueError(f"grouped_matmul: no such tile: {self}")
        if self.gathers and self.block_k not in row_gather.BLOCK_COLUMNS:
            allowed = " or ".join(map(str, row_gather.BLOCK_COLUMNS))
            raise ValueError(f"grouped_matmul: a tile that gathers takes block_k {allowed}: {self}")

    def fitted(self, weight_rows: int, contraction: int) -> "Tile":
        """Returns this tile, made smaller until it divides a weight [weight_rows, contraction]."""
        warpgroups = self.warpgroups
        while weight_rows % (warpgroups * _WEIGHT_ROWS):
            warpgroups -= 1
        block_k = math.gcd(self.block_k, contraction)
        stages = self.stages * (self.block_k // block_k)
        return dataclasses.replace(self, warpgroups=warpgroups, block_k=block_k, stages=stages)

    def shared_memory(self) -> int:
        """Returns the bytes of shared memory of a CTA, for 16-bit elements."""
        stage = (self.warpgroups * _WEIGHT_ROWS + self.rows) * self.block_k
        return 2 * (self.stages * stage + self.warpgroups * self.rows * _CHUNK)


def tile_for(tokens: int, choices: int, num_experts: int) -> Tile:
    """Returns the tuned tile for the mean number of rows of an expert, which shapes decide."""
    mean_rows = -(-tokens * choices // num_experts)
    return Tile(**tiles.lookup("grouped_matmul", tokens=tokens, mean_rows=mean_rows))


def why_not(
    *,
    dtype: DTypeLike,
    hidden_size: int,
    intermediate_size: int,
    activation: Activation = "silu",
) -> str | None:
    """Returns why the kernel cannot serve this shape, or None."""
    if activation not in ("silu", "gelu_tanh"):
        return f"the activation must be silu or gelu_tanh, not {activation}"
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if hidden_size % _WEIGHT_ROWS:
        return f"hidden size must be a multiple of {_WEIGHT_ROWS}, not {hidden_size}"
    if intermediate_size % _CHUNK:
        return f"expert width must be a multiple of {_CHUNK}, not {intermediate_size}"
    return None


def grouped_matmul(
    x: Float[Array, "T D"],
    w_gate_up: Float[Array, "E 2*I D"],  # interleaved
    w_down: Float[Array, "E D I"],
    expert_ids: Int32[Array, "T k"],
    expert_weights: Float32[Array, "T k"],
    *,
    valid: Bool[Array, " T"] | None = None,
    shared: tuple[Float[Array, "2*I D"], Float[Array, "D I"]] | None = None,  # interleaved; down
    activation: Activation = "silu",
    out_dtype: DTypeLike = jnp.float32,
    experts_of_model: int | None = None,
    tile: Tile | None = None,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> Float[Array, "T D"]:
    """Returns the weighted sum of the experts' outputs in `out_dtype`.

    Pairs with an id outside [0, E) and all pairs of tokens that are not valid are left out. The
    shared expert is one more expert, which has all tokens: its input rows are x itself, and its
    hidden and output rows come after all others. `experts_of_model` is E where these are not a
    part of the experts that tokens choose from.
    """
    T, choices = expert_ids.shape
    E, D, size = w_down.shape
    if reason := why_not(dtype=x.dtype, hidden_size=D, intermediate_size=size):
        raise ValueError(f"grouped_matmul: {reason}: x {x.shape}, w_down {w_down.shape}")
    tile = tile or tile_for(T, choices, experts_of_model or E)
    num_ctas = num_ctas or device.local_device().num_multiprocessors
    routed_rows = max(expert_tiles.most_rows(T * choices, E), tile.rows)
    grouping = {
        "num_experts": E,
        "rows": routed_rows,
        "tile_rows": tile.rows,
        "has_shared": shared is not None,
        "interpret": interpret,
    }
    row_tokens = None
    if tile.gathers:
        rows = x
        where, row_tokens = expert_tiles.list_tokens(expert_ids, valid, **grouping)
    else:
        where, rows = expert_tiles.spread(x, expert_ids, valid, **grouping)
    options = {
        "routed_rows": routed_rows,
        "shared_rows": 0 if shared is None else T,
        "num_ctas": num_ctas,
        "interpret": interpret,
    }
    shared_gate_up, shared_down = shared or (None, None)
    # A TMA box of 8 rows must not be taller than its array.
    tokens = jnp.pad(x, ((0, -T % 8), (0, 0)))
    gate_up_tile, down_tile = tile.fitted(2 * size, D), tile.fitted(D, size)
    hidden = _matmul(
        w_gate_up, shared_gate_up, rows, tokens, where, gate_up_tile,
        activation=activation, row_tokens=row_tokens, **options,
    )  # fmt: skip
    rows = _matmul(
        w_down, shared_down, hidden, None, where, down_tile,
        activation=None, row_tokens=None, **options,
    )  # fmt: skip
    return expert_tiles.combine(
        rows,
        expert_weights,
        where,
        shared_row=None if shared is None else routed_rows,
        out_dtype=out_dtype,
        interpret=interpret,
    )


def _matmul(
    weights: jax.Array, shared_weights: jax.Array | None, rows: jax.Array,
    tokens: jax.Array | None, where: expert_tiles.Segments, tile: Tile, *,
    activation: Activation | None, row_tokens: jax.Array | None, routed_rows: int, shared_rows: int,
    num_ctas: int, interpret: Any,
) -> jax.Array:  # fmt: skip
    """Returns each segment's rows times its expert's weights [E, R, K], transposed.

    With an `activation`, R is the interleaved gate and up, and the result has R / 2 columns. Expert
    E is the shared one. It multiplies `shared_rows` rows by `shared_weights` [R, K]: rows of
    `tokens` in gate_up, those behind the `routed_rows` in down. Its results go behind the latter.
    With `row_tokens`, row r of a segment, also of the shared expert's, is rows[row_tokens[r]].
    """
    gathers, is_gated = row_tokens is not None, activation is not None
    E, R, K = weights.shape
    num_experts = E + (shared_rows > 0)
    out_rows = routed_rows + -(-shared_rows // 8) * 8
    shared = []
    if shared_rows:
        shared = [shared_weights] + [tokens] * (is_gated and not gathers)
    lists = [row_tokens] * gathers + [where.counts, where.starts, where.tile_ends]
    N, warpgroups, block_k = tile.rows, tile.warpgroups, tile.block_k
    stages = tile.stages
    if tile.shared_memory() > limits.BUFFERS:
        raise ValueError(f"grouped_matmul: {tile} needs {tile.shared_memory()=} > {limits.BUFFERS}")
    weight_rows = warpgroups * _WEIGHT_ROWS
    weight_tiles, k_tiles = R // weight_rows, K // block_k
    out_columns = _WEIGHT_ROWS // 2 if is_gated else _WEIGHT_ROWS  # of a warpgroup
    # Registers of a thread. With 3 warpgroups a launch has 504 (three times 168) to distribute.
    memory_registers, compute_registers = (56, 224) if gathers else (40, 232)
    tiled = compat.tiled(64, weights.dtype)
    int32 = jnp.int32

    def body(*refs):
        weights_gmem, *shared_gmem = refs[: 1 + len(shared)]
        rows_gmem, *tokens_gmem = refs[1 + len(shared) :][: 1 + gathers]
        counts_gmem, starts_gmem, tile_ends_gmem = refs[2 + len(shared) + gathers :][:3]
        out_gmem, weights_smem, rows_smem, out_smem, *ready, full, empty = refs[-6 - gathers :]
        ring = Ring(stages=stages, full=full, empty=empty)
        if gathers:
            (tokens_gmem,), (ready,) = tokens_gmem, ready
            row_gather.start(ready, interpret=interpret)
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        items = tile_ends_gmem[num_experts - 1] * weight_tiles
        my_items = lax.div(items - cta + (num_ctas - 1), int32(num_ctas))

        def locate(index):
            """Returns (expert, first row, rows up to a multiple of 8, weight tile) of an item."""
            item = cta + index * num_ctas
            row_tile = lax.div(item, int32(weight_tiles))
            expert = int32(0)  # the number of experts whose tiles all come before this one
            for step in reversed(range((num_experts - 1).bit_length())):
                probe = jnp.minimum(expert + (1 << step), num_experts) - 1
                expert = jnp.where(tile_ends_gmem[probe] <= row_tile, probe + 1, expert)
            routed = jnp.minimum(expert, E - 1)
            count = counts_gmem[routed]
            start = starts_gmem[routed]
            if shared_rows:
                count = jnp.where(expert == E, shared_rows, count)
                start = jnp.where(expert == E, routed_rows, start)
            past_end = tile_ends_gmem[expert] - row_tile  # >= 1: the last tile has 1
            first = (lax.div(count + (N - 1), int32(N)) - past_end) * N
            size = jnp.minimum(lax.div(count - first + 7, int32(8)) * 8, N)
            row = pl.multiple_of(start + first, 8)
            return expert, row, size, lax.rem(item, int32(weight_tiles))

        @pl.when(warpgroup == warpgroups)
        def _fetch():
            plgpu.set_max_registers(memory_registers, action="decrease")

            def fetch_item(index, _):
                expert, row, size, weight_tile = locate(index)
                tile_rows = pl.ds(weight_tile * weight_rows, weight_rows)

                def fetch(k, _):
                    step = index * k_tiles + k
                    stage = ring.stage_of(step)
                    ring.wait_until_empty(step)
                    columns = pl.ds(k * block_k, block_k)

                    def copy(weights_of, rows_of, first):
                        plgpu.copy_gmem_to_smem(
                            weights_of.at[tile_rows, columns],
                            weights_smem.at[stage],
                            full.at[stage],
                        )
                        if gathers:
                            return
                        plgpu.copy_gmem_to_smem(
                            rows_of.at[pl.ds(pl.multiple_of(first, 8), N), columns],
                            rows_smem.at[stage],
                            full.at[stage],
                        )

                    def copy_routed():
                        copy(weights_gmem.at[expert], rows_gmem, row)

                    def copy_shared():
                        shared_weights_gmem, *all_tokens_gmem = shared_gmem
                        if all_tokens_gmem:
                            copy(shared_weights_gmem, all_tokens_gmem[0], row - routed_rows)
                        else:
                            copy(shared_weights_gmem, rows_gmem, row)

                    if shared_rows:
                        pl.when(expert < E)(copy_routed)
                        pl.when(expert == E)(copy_shared)
                    else:
                        copy_routed()
                    if gathers:
                        row_gather.issue(
                            rows_gmem, tokens_gmem, row, size, columns, rows_smem.at[stage],
                            ready, stage, tiled, interpret=interpret,
                        )  # fmt: skip
                    return ()

                return lax.fori_loop(0, k_tiles, fetch, ())

            lax.fori_loop(0, my_items, fetch_item, ())
            ring.drain(my_items * k_tiles)

        def store(source, row, column, size):
            """Copies the first `size` rows of shared memory to the output."""

            def copy(first, length):
                plgpu.copy_smem_to_gmem(
                    source.at[pl.ds(first, length)],
                    out_gmem.at[pl.ds(pl.multiple_of(row + first, 8), length), column],
                )

            # The next segment begins right after the last 8 rows: never store past them.
            pl.when(size == N)(lambda: copy(0, N))
            for exponent in range(3, (N - 1).bit_length()):
                length = 1 << exponent
                first = pl.multiple_of(size & -(2 * length), 8)
                partial = (size < N) & ((size & length) != 0)
                pl.when(partial)(lambda first=first, length=length: copy(first, length))

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(compute_registers, action="increase")
            my_weights = pl.ds(warpgroup * _WEIGHT_ROWS, _WEIGHT_ROWS)
            out_mine = out_smem.at[warpgroup]

            def compute_item(index, _):
                _, row, size, weight_tile = locate(index)
                first_step = index * k_tiles

                def product(acc):
                    def accumulate(step, stage):
                        if gathers:
                            row_gather.wait(ready, step, stages, interpret=interpret)
                        plgpu.wgmma(acc, weights_smem.at[stage, my_weights], rows_smem.at[stage].T)

                    ring.multiply(accumulate, k_tiles, first=first_step)
                    value = acc[...]
                    ring.release(first_step + k_tiles - 1)
                    return value

                value = pl.run_scoped(product, compat.ACC((_WEIGHT_ROWS, N), jnp.float32))
                if activation is not None:
                    gate, up = value[:_CHUNK], value[_CHUNK:]
                    value = _activated(gate, activation) * up
                value = value.astype(out_gmem.dtype)
                column = (weight_tile * warpgroups + warpgroup) * out_columns
                for first in range(0, out_columns, _CHUNK):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_mine.T[...] = value[first : first + _CHUNK]
                    plgpu.commit_smem()
                    store(out_mine, row, pl.ds(column + first, _CHUNK), size)
                return ()

            lax.fori_loop(0, my_items, compute_item, ())
            plgpu.wait_smem_to_gmem(0)

    body.__name__ = "expert_gate_up" if is_gated else "expert_down"

    def buffer(*shape):
        return plgpu.SMEM(shape, weights.dtype, transforms=tiled)

    return compat.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((out_rows, R // 2 if is_gated else R), weights.dtype),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            buffer(stages, weight_rows, block_k),
            buffer(stages, N, block_k),
            buffer(warpgroups, N, _CHUNK),
            *[row_gather.barriers(stages, interpret=interpret)] * gathers,
            *rings.barriers(stages, copies=1 if gathers else 2, readers=warpgroups),
        ],
        # Safe: only TMA reads shared memory that a warpgroup writes, after commit_smem, and the
        # warpgroup writes it again only after wait_smem_to_gmem.
        compiler_params={"unsafe_no_auto_barriers": True},
        interpret=interpret,
    )(weights, *shared, rows, *lists)


def _activated(gate: jax.Array, activation: Activation) -> jax.Array:
    """Returns the gate times the sigmoid of itself, or of GELU's cubic."""
    slope = gate
    if activation == "gelu_tanh":
        slope = _GELU_SLOPE * (gate + _GELU_CUBIC * (gate * gate * gate))
    return gate / (1 + jnp.exp(-slope))
