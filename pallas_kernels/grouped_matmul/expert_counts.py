"""Which row each (token, choice) pair gets: counting by expert within a kernel.

The row of a pair is its expert's start, plus the number of pairs of that expert before it: a stable
counting sort without atomics. A warp takes consecutive pairs, 32 at a time. Lanes with the same
expert find one another (match.any): a lane's rank is the number of such lanes below it, and the
lowest lane adds the whole group to the warp's histogram in shared memory. Then one thread per
expert sums over the warps, over the CTAs of the cluster (through distributed shared memory) and, by
shuffles, over the lower experts. Now the histograms hold the row of each warp's first pair, and
every lane adds the rank that it kept.

Latency is the bound: reading the ids, a shared-memory round trip per 32 pairs of a warp, four
barriers and, with several CTAs, one barrier of the cluster. `place_pairs` is code of one thread
(`lane_code`), with which other kernels begin. `reference` computes the same by one formula, for the
interpreter.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxtyping import Array, Int32

from pallas_kernels.hopper import lane_code
from pallas_kernels.hopper.lane_code import WARP, Bit, Int

ALIGNMENT = 8  # rows; segments start at multiples of it
_LOADS_AT_ONCE = 8  # ids that a thread loads together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """One counting of T * k pairs: its sizes, and how CTAs and warps share the pairs.

    The `ctas` CTAs are one cluster. Each counts an equal part of the pairs, and its warps count
    equal runs of that part.
    """

    tokens: int
    choices: int
    num_experts: int
    tile_rows: int
    has_shared: bool
    warps: int
    ctas: int = 1

    @property
    def pairs(self) -> int:
        return self.tokens * self.choices

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def steps(self) -> int:
        """Pairs of a lane."""
        return -(-self.pairs // (self.ctas * self.threads))

    @property
    def experts_per_thread(self) -> int:
        return -(-self.num_experts // self.threads)

    @property
    def histogram(self) -> int:
        """Entries of a warp's histogram: the experts, and one for pairs without a row."""
        return self.num_experts + 1

    def scratch(self) -> list[int]:
        """Returns the sizes in int32 of the shared-memory buffers that `place_pairs` needs."""
        per_expert = self.experts_per_thread * self.threads
        return [self.warps * self.histogram, per_expert, 2 * self.experts_per_thread * self.warps]

    def lists(self) -> list[int]:
        """Returns the sizes of the lists: starts, counts and cumulated tiles of the experts."""
        return [self.num_experts, self.num_experts, self.num_experts + self.has_shared]


def reference(
    ids: Int32[Array, " pairs"], valid: Int32[Array, " T"] | None = None, *, counting: Counting
) -> list[Int32[Array, "..."]]:
    """Returns [places, starts, counts, tile_ends]; it compares every pair with every other."""
    E, tile_rows = counting.num_experts, counting.tile_rows
    used = (ids >= 0) & (ids < E)
    if valid is not None:
        used &= jnp.repeat(valid != 0, counting.choices)
    experts = jnp.where(used, ids, E)
    counts = jnp.sum(experts[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    lower = jnp.cumsum(counts) - counts
    starts = _start(lower, jnp.arange(E, dtype=jnp.int32))
    pair = jnp.arange(ids.size)
    ranks = jnp.sum((experts == experts[:, None]) & (pair < pair[:, None]), axis=1)
    places = jnp.where(used, starts[jnp.minimum(experts, E - 1)] + ranks, -1)
    tiles = (counts + tile_rows - 1) // tile_rows
    if counting.has_shared:
        tiles = jnp.append(tiles, -(-counting.tokens // tile_rows))
    return [a.astype(jnp.int32) for a in (places, starts, counts, jnp.cumsum(tiles))]


def place_pairs(
    routing: Sequence[ir.Value],
    lists: Sequence[ir.Value],
    scratch: Sequence[ir.Value],
    counting: Counting,
    *,
    cta: Int,
    writes_lists: Bit,
    write: Callable[[Int, Bit, Int], None],
) -> None:
    """Calls `write(pair, whether it has a row, row)` for each of this thread's pairs.

    All threads of all CTAs of the cluster must run it. All refs hold int32. `routing` has the ids
    [T * k] and, unless all tokens are valid, flags [T] (0: the token's pairs have no row). `lists`
    are starts, counts and cumulated tiles; threads with `writes_lists` write them. `scratch` is
    shared memory. `write` is also called for numbers past the last pair; they have no row.
    """
    E = counting.num_experts
    histograms = scratch[0]
    thread = lane_code.thread()
    warp, lane = thread // WARP, thread % WARP

    run = counting.steps * WARP
    first = (cta * counting.warps + warp) * run + lane
    batches = [
        range(at, min(at + _LOADS_AT_ONCE, counting.steps))
        for at in range(0, counting.steps, _LOADS_AT_ONCE)
    ]

    def load_batch(first: Int, steps: range) -> tuple[list[Int], list[Int]]:
        pairs = [first + step * WARP for step in steps]
        return pairs, [_expert(routing, pair, counting) for pair in pairs]

    pairs, experts = load_batch(first, batches[0])
    cleared = counting.scratch()[0]  # while the first ids are on their way
    for entry in range(0, cleared, counting.threads):
        with lane_code.when(thread + entry < cleared):
            lane_code.store(histograms, thread + entry, lane_code.constant(0))
    lane_code.sync_cta()

    mine = warp * counting.histogram
    ranks = [_ranks(experts, histograms, mine, lane)]
    for steps in batches[1:]:
        _, experts = load_batch(first, steps)
        ranks.append(_ranks(experts, histograms, mine, lane))
    lane_code.sync_cta()

    _place_warps(cta, lists, writes_lists, scratch, counting)
    lane_code.sync_cta()
    if counting.ctas > 1:  # this CTA has read the shared memory of the others: they may end now
        lane_code.arrive_at_cluster(after_writes=False)
    for steps, batch_ranks in zip(batches, ranks, strict=True):
        if len(batches) > 1:  # loading again costs less than registers for all of them
            pairs, experts = load_batch(lane_code.opaque(first), steps)
        places = [lane_code.load(histograms, mine + expert) for expert in experts]
        for pair, expert, place, rank in zip(pairs, experts, places, batch_ranks, strict=True):
            write(pair, expert < E, place + rank)
    if counting.ctas > 1:
        lane_code.wait_for_cluster()


def _expert(routing: Sequence[ir.Value], pair: Int, counting: Counting) -> Int:
    """Returns a pair's expert, or `num_experts` if the pair gets no row."""
    ids, *valid = routing
    in_range = lane_code.least(pair, counting.pairs - 1)
    expert = lane_code.load(ids, in_range)
    # The comparisons are unsigned: a negative id is a large number.
    used = (pair < counting.pairs) & (expert < counting.num_experts)
    for flags in valid:
        flag = lane_code.load(flags, in_range // counting.choices)
        used = used & (lane_code.constant(0) < flag)
    return lane_code.select(used, expert, counting.num_experts)


def _ranks(experts: list[Int], histograms: ir.Value, mine: Int, lane: Int) -> list[Int]:
    """Returns for each pair how many earlier pairs of this warp have its expert.

    It also counts the pairs in the warp's own histogram, which begins at entry `mine`.
    """
    groups = [lane_code.lanes_with(expert) for expert in experts]
    lower_lanes = (lane_code.constant(1) << lane) - 1
    ranks = []
    for expert, group in zip(experts, groups, strict=True):
        before = lane_code.load(histograms, mine + expert)
        lower = lane_code.count_bits(group & lower_lanes)
        ranks.append(before + lower)
        lane_code.sync_warp()
        with lane_code.when(lower.equals(0)):
            lane_code.store(histograms, mine + expert, before + lane_code.count_bits(group))
        lane_code.sync_warp()
    return ranks


def _place_warps(
    cta: Int,
    lists: Sequence[ir.Value],
    writes_lists: Bit,
    scratch: Sequence[ir.Value],
    counting: Counting,
) -> None:
    """Replaces each warp's counts by the rows of its first pairs; writes the lists."""
    histograms, totals, sums = scratch
    E, warps, rows = counting.num_experts, counting.warps, counting.tile_rows
    thread = lane_code.thread()
    experts = [thread + index * counting.threads for index in range(counting.experts_per_thread)]
    by_warp = []
    for expert in experts:
        # A thread without an expert counts the last one and stores nothing.
        known = lane_code.least(expert, E - 1)
        entries = [known + warp * counting.histogram for warp in range(warps)]
        counts = [lane_code.load(histograms, entry) for entry in entries]
        by_warp.append([lane_code.select(expert < E, count, 0) for count in counts])
    counts = [_sum(warp_counts) for warp_counts in by_warp]
    befores = [lane_code.constant(0) for _ in experts]  # pairs of lower CTAs
    if counting.ctas > 1:
        for expert, count in zip(experts, counts, strict=True):
            lane_code.store(totals, expert, count)
        lane_code.arrive_at_cluster(after_writes=True)
        lane_code.wait_for_cluster()
        peers = [lane_code.of_peer(totals, peer) for peer in range(counting.ctas)]
        by_cta = [[lane_code.load(peer, expert) for peer in peers] for expert in experts]
        counts = [_sum(cta_counts) for cta_counts in by_cta]
        befores = [_sum_below(cta, cta_counts) for cta_counts in by_cta]

    tiles = [(count + (rows - 1)) // rows for count in counts]
    pair_ends, tile_ends = _sums_over_experts(counts, tiles, sums, counting)
    for expert, in_warps, count, before, pair_end, tile_end in zip(
        experts, by_warp, counts, befores, pair_ends, tile_ends, strict=True
    ):
        start = _start(pair_end - count, expert)
        with lane_code.when(expert < E):
            place = start + before
            for warp, in_warp in enumerate(in_warps):
                lane_code.store(histograms, expert + warp * counting.histogram, place)
                place += in_warp
        with lane_code.when(writes_lists & (expert < E)):
            for ref, number in zip(lists, (start, count, tile_end), strict=True):
                lane_code.store(ref, expert, number)
        if counting.has_shared:
            with lane_code.when(writes_lists & expert.equals(E - 1)):
                shared_tiles = -(-counting.tokens // rows)
                lane_code.store(lists[2], lane_code.constant(E), tile_end + shared_tiles)


def _sums_over_experts(
    counts: list[Int], tiles: list[Int], sums: ir.Value, counting: Counting
) -> tuple[list[Int], list[Int]]:
    """Returns two sums for each expert of this thread: counts and tiles of all experts up to it."""
    thread = lane_code.thread()
    warp, lane = thread // WARP, thread % WARP
    in_warp = [(lane_code.prefix_sum(c), lane_code.prefix_sum(t))
               for c, t in zip(counts, tiles, strict=True)]  # fmt: skip
    warps = counting.warps * counting.experts_per_thread
    numbers = [warp + index * counting.warps for index in range(counting.experts_per_thread)]
    with lane_code.when(lane.equals(WARP - 1)):
        for number, (count, tile) in zip(numbers, in_warp, strict=True):
            lane_code.store(sums, number, count)
            lane_code.store(sums, number + warps, tile)
    lane_code.sync_cta()
    # Warps without experts have nothing to add.
    holding = -(-counting.num_experts // WARP)
    ends = ([], [])
    for part in range(2):
        warp_sums = [
            lane_code.load(sums, lane_code.constant(index + part * warps))
            for index in range(holding)
        ]
        for number, values in zip(numbers, in_warp, strict=True):
            ends[part].append(values[part] + _sum_below(number, warp_sums))
    return ends


def _start(lower_pairs, expert):
    """Returns where an expert's rows start; `lower_pairs` are the pairs of all lower experts.

    Every lower segment then has room for its last 8 rows.
    """
    return (lower_pairs + expert * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def _sum_below(end: Int, numbers: list[Int]) -> Int:
    """Returns the sum of the numbers at places lower than `end`."""
    return _sum([
        lane_code.select(lane_code.constant(index) < end, number, 0)
        for index, number in enumerate(numbers)
    ])  # fmt: skip


def _sum(numbers: list[Int]) -> Int:
    total, *others = numbers
    for number in others:
        total += number
    return total
