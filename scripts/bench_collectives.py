"""Times sums over the GPUs of a mesh: our kernels, and XLA's collectives, in one run.

    python scripts/bench_collectives.py --tp 2
    python scripts/bench_collectives.py --tp 2 --skews 1000     # ranks that begin far apart

A program is a loop of chains of 32 sums with residual add and norm, as in a decode launch of a
model of 16 layers; "returns" is the time after which the call that starts it returns to the host: a
small part of the whole where the loop is one CUDA graph. "bits" says whether all ranks, and both
implementations, have the same bits in the end. The floor is the bytes that a GPU sends to the
others over NVLink (`floors.py`) or those of the norm in its own memory. With `--skews`, each rank
waits a random time before each of so many launches. With `--absent`, the last rank leaves out the
sums of one launch at the end: the launch must end with errors, not hang.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import floors
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

import pallas_kernels
from jdllm.device import devices, sharding
from jdllm.runner.launch import executables, over_mesh, peer_buffers

Arrays = dict[str, Any]
CHAIN = 32  # sums of a step
SMALL_GRAPHS = "xla_gpu_graph_min_graph_size"
MOST_TURNS = 200  # of `_idle`
EPS = 1e-6


def main() -> None:
    """Parses the command line, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512, 2048])
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--steps", type=int, default=100, help="of the loop of one program")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skews", type=int, default=0, help="launches with ranks far apart")
    parser.add_argument("--absent", action="store_true", help="a rank that never comes, at the end")
    args = parser.parse_args()
    devices.prepare_several()
    floors.measured_on(jax.devices()[0].device_kind)
    mesh = sharding.make_mesh(args.tp, devices.every())
    assert mesh is not None, "sums over one GPU are no sums"
    reason = peer_buffers.why_not(mesh)
    buffers = None
    if reason is None:
        buffers = peer_buffers.allocate(mesh, row_bytes=2 * max(args.widths))
    out = sys.stdout.write
    out(f"# {' '.join(sys.argv)}\n# {args.tp} x {jax.devices()[0].device_kind}, ")
    out(f"jax {jax.__version__}, bfloat16; kernels: {reason or 'yes'}\n")
    out(f"{'T':>5s} {'D':>5s} {'implementation':14s} {'us a sum':>9s} {'floor':>6s} ")
    out(f"{'returns ms':>10s} {'of ms':>8s}  bits\n")
    names = ("mosaic_gpu", "xla") if buffers else ("xla",)
    for tokens, width in itertools.product(args.tokens, args.widths):
        found: dict[str, np.ndarray] = {}
        for name in names:
            arrays = _arrays(mesh, tokens, width)
            mine = buffers if name == "mosaic_gpu" else None
            run = _program(mesh, mine, args.steps, arrays)
            result, returned_s, whole_s = _timed(run, arrays, args.repeats)
            found[name] = _same_on_all(result)
            first = found[names[0]]
            same = "equal" if np.array_equal(found[name], first) else "DIFFERENT"
            out(f"{tokens:5d} {width:5d} {name:14s} {whole_s / args.steps / CHAIN * 1e6:9.2f} ")
            out(f"{_floor_us(tokens, width, args.tp):6.2f} {returned_s * 1e3:10.2f} ")
            out(f"{whole_s * 1e3:8.2f}  {same}\n")
    if args.skews and buffers:
        most_ms = _skewed(mesh, buffers, args.skews)
        out(f"{args.skews} launches, ranks up to {most_ms:.1f} ms apart: all bits equal\n")
    if args.absent and buffers:
        out(_without_last(mesh, buffers))


def _program(
    mesh: Mesh,
    buffers: peer_buffers.PeerBuffers | None,
    steps: int,
    arrays: Arrays,
    *,
    waits: bool = False,
) -> Callable[[Arrays], jax.Array]:
    """Returns a function of `_arrays` like these that gives [tp, T, D], what every rank has."""

    def step(params: Arrays, memory: Arrays, _: None) -> tuple[Arrays, None]:
        part, weight = params["part"], params["weight"]
        if waits:
            part = part + _idle(params["turns"][0]).astype(part.dtype)
        add = functools.partial(
            pallas_kernels.all_reduce_add_rms_norm,
            eps=EPS,
            axis_name=sharding.AXIS,
            peers=sharding.peers(),
        )

        def sums(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            normed, x = carry
            del index
            for _ in range(CHAIN):
                # What is summed depends on the sum before, or XLA sums once, ahead of the loop.
                normed, x = add(x, (part, normed), weight)
            return normed, x

        def loop(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, steps, sums, (x, x))[1]

        begin = jnp.zeros_like(memory["x"])
        if not waits:
            return {"x": loop(begin)}, None
        return {"x": jax.lax.cond(params["turns"][0] >= 0, loop, lambda x: x, begin)}, None

    def whole(arrays: Arrays) -> Arrays:
        return arrays if buffers is None else {**arrays, over_mesh.PEERS: buffers.peers}

    params, memory = whole(arrays), {"x": arrays["part"]}
    everywhere = jax.jit(over_mesh.on_every_rank(step, params, memory, mesh))
    options: dict[str, str | bool] = {
        **executables.compiler_options(devices.facts(mesh.devices.size))
    }
    if options:  # a loop with little around it is no graph by default
        options[SMALL_GRAPHS] = "1"
    compiled = everywhere.lower(params, memory, None).compile(compiler_options=options)
    return lambda arrays: compiled(whole(arrays), {"x": arrays["part"]}, None)[0]["x"]


def _idle(turns: jax.Array) -> jax.Array:
    """Returns 0 after `turns` rounds of work that nothing else waits for."""
    wide = jnp.full((256, 256), 1e-3, jnp.float32)
    work = jax.lax.fori_loop(0, turns, lambda _, x: x @ x, wide)
    return jnp.sum(work) * 0


def _arrays(mesh: Mesh, tokens: int, width: int) -> Arrays:
    rng = np.random.default_rng(tokens + width)
    tp = mesh.devices.size
    split, whole = (NamedSharding(mesh, spec) for spec in (sharding.SPLIT, sharding.REPLICATED))
    part = rng.normal(size=(tp, tokens, width)).astype(jnp.bfloat16)
    weight = rng.normal(size=(width,)).astype(jnp.bfloat16)
    arrays = {"part": jax.device_put(part, split), "weight": jax.device_put(weight, whole)}
    return _with_turns(arrays, mesh, np.zeros(tp))


def _with_turns(arrays: Arrays, mesh: Mesh, turns: np.ndarray) -> Arrays:
    """Returns the arrays of ranks that `_idle` for so many turns each, and below 0 do not come."""
    split = NamedSharding(mesh, sharding.SPLIT)
    return {**arrays, "turns": jax.device_put(turns.astype(np.int32)[:, None], split)}


def _timed(
    run: Callable[[Arrays], jax.Array], arrays: Arrays, repeats: int
) -> tuple[jax.Array, float, float]:
    """Returns the result, and the medians of when the call returned and when it had ended."""
    result = jax.block_until_ready(run(arrays))
    returned, ended = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        result = run(arrays)
        returned.append(time.perf_counter() - began)
        jax.block_until_ready(result)
        ended.append(time.perf_counter() - began)
    return result, statistics.median(returned), statistics.median(ended)


def _same_on_all(result: jax.Array) -> np.ndarray:
    """Returns what rank 0 has; fails if another has other bits."""
    ranks = np.asarray(result).view(np.uint16)
    for other in ranks[1:]:
        np.testing.assert_array_equal(other, ranks[0])
    return ranks[0]


def _skewed(mesh: Mesh, buffers: peer_buffers.PeerBuffers, count: int) -> float:
    """Returns how many milliseconds ranks were apart at most."""
    rng, tp = np.random.default_rng(0), mesh.devices.size
    arrays = _arrays(mesh, 32, 2048)
    run = _program(mesh, buffers, 2, arrays, waits=True)
    expected = _same_on_all(run(arrays))
    for _ in tqdm(range(count), desc="skews", disable=None):
        found = _same_on_all(run(_with_turns(arrays, mesh, rng.integers(0, MOST_TURNS, tp))))
        np.testing.assert_array_equal(found, expected)
    most, none = (
        _timed(run, _with_turns(arrays, mesh, np.full(tp, turns)), 5)[2]
        for turns in (MOST_TURNS, 0)
    )
    return 1e3 * (most - none)


def _without_last(mesh: Mesh, buffers: peer_buffers.PeerBuffers) -> str:
    """Returns how a launch ends in whose sums one rank takes no part; the GPUs are lost with it."""
    arrays, of = _arrays(mesh, 32, 2048), mesh.devices.size
    run = _program(mesh, buffers, 2, arrays, waits=True)
    arrays = _with_turns(arrays, mesh, np.array([*[0] * (of - 1), -1]))
    began = time.perf_counter()
    found = over_mesh.faults(run(arrays))
    took_s = time.perf_counter() - began
    lines = "; ".join(fault.splitlines()[0] for fault in found)
    return f"a rank never came: errors on {len(found)} of {of} after {took_s:.1f} s: {lines}\n"


def _floor_us(tokens: int, width: int, tp: int) -> float:
    row_bytes = 2 * tokens * width
    sent, moved = (tp - 1) * row_bytes, 4 * row_bytes
    return max(sent / floors.LINK_BYTES_PER_S, moved / floors.BYTES_PER_S) * 1e6


if __name__ == "__main__":
    main()
