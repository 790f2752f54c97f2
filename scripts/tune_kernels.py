"""Finds the fastest tile parameters of each kernel on this device and writes its table.

    python scripts/tune_kernels.py --ops grouped_matmul,extend_attention --write

Every entry of the present table (`pallas_kernels/<op>/tiles/<device>.json`) is a bucket. The script
times the bucket's problem below with every candidate tile, as `bench_kernels.py` does. The fastest
tile replaces the entry's own if it is faster by at least `--margin`, so that noise does not rewrite
the table. Without `--write` the table is only printed. Run the kernel tests afterwards: they lower
every entry.

An entry of dense_matmul is one exact shape, which is also its problem. There an empty tile means
XLA, and XLA replaces a tile that does not beat it by the margin. To tune one more shape, add it
with an empty tile.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import bench_kernels as bench
import jax
import jax.numpy as jnp
import kernel_cases as cases
from tqdm import tqdm

from pallas_kernels import device, dispatch, lowered_once, tiles
from pallas_kernels.dense_matmul import wide_matmul

# For each op, in the table's order: the bounds of an entry, and the problem for its bucket.
PROBLEMS: dict[str, list[tuple[dict[str, int], Any]]] = {
    "grouped_matmul": [
        ({"mean_rows": 2}, functools.partial(cases.moe, T=32)),
        ({"mean_rows": 5}, functools.partial(cases.moe, T=128)),
        ({"mean_rows": 16}, functools.partial(cases.moe, T=512)),
        ({"mean_rows": 40}, functools.partial(cases.moe, T=1024)),
        ({"mean_rows": 72}, functools.partial(cases.moe, T=2048)),
        ({"mean_rows": 136}, functools.partial(cases.moe, T=4096)),
        ({}, functools.partial(cases.moe, T=16384)),
    ],
    "extend_attention": [
        (
            {"ragged": 0, "streams": 1, "items": 16, "width": 1024},
            functools.partial(cases.attention, B=4, S=544),
        ),
        (
            {"ragged": 0, "streams": 1, "items": 32, "width": 1024},
            functools.partial(cases.attention, B=8, S=544),
        ),
        (
            {"ragged": 0, "streams": 1, "width": 1024},
            functools.partial(cases.attention, B=64, S=544),
        ),
        ({"ragged": 0, "streams": 1, "items": 8}, functools.partial(cases.attention, B=1, S=4096)),
        ({"ragged": 0, "streams": 1, "items": 32}, functools.partial(cases.attention, B=4, S=4096)),
        (
            {"ragged": 0, "streams": 1, "items": 64},
            functools.partial(cases.attention, B=16, S=2048),
        ),
        ({"ragged": 0, "streams": 1}, functools.partial(cases.attention, B=64, S=2048)),
        *(
            ({"ragged": 0, **bounds}, functools.partial(cases.attention, B=B, S=S, N=32, K=32))
            for bounds, B, S in (
                ({"items": 16, "width": 1024}, 1, 544),
                ({"width": 1024}, 16, 544),
                ({"items": 16}, 1, 4096),
                ({"items": 64}, 4, 4096),
                ({}, 16, 4096),
            )
        ),
        (
            {"rows": 1, "items": 128, "tokens": 256},  # the window of one canvas
            functools.partial(cases.attention, B=1, S=384, L=128, N=32, K=32, full=True),
        ),
        (
            {"streams": 1},
            functools.partial(cases.attention, B=1, S=8192, L=8192, N=32, K=32),
        ),
        ({}, functools.partial(cases.attention, B=8, S=2048, L=2048, N=16, K=16, block=4)),
    ],
    "unembed_stats": [
        ({"tokens": 64, "draws": 0}, functools.partial(cases.unembed, T=64)),
        ({"tokens": 128, "draws": 0}, functools.partial(cases.unembed, T=128)),
        ({"draws": 0}, functools.partial(cases.unembed, T=512)),
        ({"tokens": 64}, functools.partial(cases.unembed, T=64, draws=True)),
        ({"tokens": 128}, functools.partial(cases.unembed, T=128, draws=True)),
        ({}, functools.partial(cases.unembed, T=512, draws=True)),
    ],
}
# For each op: values of each parameter; combinations that the kernel refuses are skipped.
CANDIDATES: dict[str, dict[str, tuple[Any, ...]]] = {
    "grouped_matmul": {
        "rows": (8, 16, 24, 32, 48, 64, 80, 96, 128, 144),
        "warpgroups": (1, 2),
        "block_k": (64, 128),
        "stages": (3, 4, 5, 6),
        "gathers": (False, True),
    },
    "extend_attention": {
        "kv_tokens": (64, 128),
        "stages": (2, 3, 4),
        "split_tokens": (0, 128, 256, 512, 1024),
        "persistent": (True, False),
        "ping_pong": (True, False),
        "max_rows": (64, 128),
    },
    "unembed_stats": {
        "columns": (64, 128, 160, 192, 240, 256),
        "split": ("rows", "columns"),
        "pair": (False, True),
        "stages": (4, 5, 6),
    },
    "dense_matmul": {
        "tokens": (128, 192, 256),
        "columns": tuple(range(48, 257, 16)),
        "rows": (64, 128),
        "splits": (1, 2, 4),
        "share_tokens": (1, 2),
        "share_weights": (1, 2),
        "swapped": (False, True),
    },
}
MAY_USE_XLA = ("dense_matmul",)  # where an empty tile means XLA
_BUSY = 0.8  # of the SMs, over all waves


def problems(op: str, table: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields the entries of the table to tune, each with a function that builds its problem."""
    if op == "dense_matmul":
        for entry in table[:-1]:  # the last entry is for all other shapes
            yield entry, functools.partial(_matmul, **entry["when"], **entry["equal"])
        return
    for bounds, problem in PROBLEMS[op]:
        (entry,) = (entry for entry in table if entry["when"] == bounds)
        yield entry, problem


def _matmul(tokens: int, columns: int, contraction: int, halves: int) -> cases.Case:
    return cases.matmul(T=tokens, N=columns, K=contraction, swiglu=halves == 2)


def candidates(op: str, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the tiles that are worth a try in a bucket."""
    names, bounds = CANDIDATES[op], entry["when"]
    for values in itertools.product(*names.values()):
        tile = dict(zip(names, values, strict=True))
        if op == "grouped_matmul":
            mean = bounds.get("mean_rows", 96)
            if not mean <= tile["rows"] <= max(16, 3 * mean):
                continue
        if op == "extend_attention":
            decodes = bounds.get("ragged") == 0
            if tile["persistent"] != decodes or (tile["split_tokens"] and not decodes):
                continue
        if op == "dense_matmul" and not _suits(tile, **bounds, **entry["equal"]):
            continue
        yield tile


def _suits(
    parameters: dict[str, Any], tokens: int, columns: int, contraction: int, halves: int
) -> bool:
    """Returns whether the shape is whole tiles and leaves few SMs idle."""
    try:
        tile = wide_matmul.Tile(**parameters)
    except ValueError:
        return False
    plan = wide_matmul.Plan(
        tile=tile,
        tokens=tokens,
        columns=columns,
        contraction=contraction,
        halves=halves,
        dtype=jnp.dtype(cases.BF16),
    )
    ctas = math.prod(plan.groups) * tile.cluster
    sms = device.local_device().num_multiprocessors
    busy = ctas / (sms * -(-ctas // sms))
    whole = tokens % (tile.tokens * tile.share_weights) == 0
    return not plan.problems() and whole and busy >= _BUSY


def timed(case: cases.Case, op: str, tile: dict[str, Any], args: argparse.Namespace) -> float:
    """Returns milliseconds a call with this tile; infinity if the kernel refuses it."""
    implementation = "mosaic_gpu" if tile or op not in MAY_USE_XLA else "xla"
    tuned = tiles.lookup

    def forced(wanted: str, **sizes: int) -> dict[str, Any]:
        return tile if wanted == op else tuned(wanted, **sizes)

    jax.clear_caches()
    lowered_once.clear()
    try:
        with mock.patch.object(tiles, "lookup", forced):
            return bench.time_case(case, implementation, args.calls, args.repeats)[0]
    except (ValueError, jax.errors.JaxRuntimeError):
        return float("inf")


def tune(op: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the op's table with the winners in place; prints the best of each bucket."""
    out = sys.stdout.write
    table = [dict(entry) for entry in tiles.entries(op)]
    for entry, problem in problems(op, table):
        case = problem()
        now = timed(case, op, entry["tile"], args)
        found = [(now, entry["tile"])]
        for tile in tqdm(list(candidates(op, entry)), desc=f"{op} {case.shape}", disable=None):
            found.append((timed(case, op, tile, args), tile))
        best, tile = min(found, key=lambda pair: pair[0])
        if best > now * (1 - args.margin):
            best, tile = now, entry["tile"]
        if tile and op in MAY_USE_XLA:
            xla = timed(case, op, {}, args)
            found.append((xla, {}))
            tile = {} if best > xla * (1 - args.margin) else tile
        out(f"{op} {case.shape} {entry['when']}: now {now:.4f} ms, best {best:.4f} ms, ")
        out(f"floor {case.work.floor_ms:.4f}: {'kept' if tile == entry['tile'] else tile}\n")
        for ms, other in sorted(found, key=lambda pair: pair[0])[: args.top]:
            out(f"    {ms:.4f} {other}\n")
        sys.stdout.flush()
        entry["tile"] = tile
    return table


def main() -> None:
    """Parses the command line, tunes, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", default=",".join(CANDIDATES))
    parser.add_argument("--write", action="store_true", help="write the table, not only print it")
    parser.add_argument("--margin", type=float, default=0.02)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--top", type=int, default=3, help="tiles listed per bucket")
    args = parser.parse_args()
    try:
        dispatch.choose("grouped_matmul", "mosaic_gpu")
    except ValueError as refused:
        sys.exit(f"no kernel to tune here: {refused}")
    sys.stdout.write(
        f"# {' '.join(sys.argv)}\n# {device.local_device().kind}, jax {jax.__version__}\n"
    )
    for op in args.ops.split(","):
        table = tune(op, args)
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in table)
        if args.write:
            path = tiles.path_of(op, tiles.device_name())
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        else:
            sys.stdout.write(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
