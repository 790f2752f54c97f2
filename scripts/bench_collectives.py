"""Times sums over the GPUs of a mesh: our kernels, and XLA's collectives, in one run.

    python scripts/bench_collectives.py --tp 2
    python scripts/bench_collectives.py --tp 2 --skews 1000     # ranks that begin far apart

A program is a loop of chains of 32 sums with residual add and norm, as in a decode launch of a
model of 16 layers; "returns" is the time after which the call that starts it returns to the host: a
small part of the whole where the loop is one CUDA graph. "bits" says whether all ranks, and both
implementations, have the same bits in the end. The floor is the bytes that a GPU sends to the
others over NVLink (450 GB/s a direction on H100 and H200) or those of the norm in its own memory.
With `--skews`, each rank waits a random time before each of so many launches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from tqdm import tqdm

import pallas_kernels
from jdllm import device, sharding
from jdllm.runner.launch import peer_buffers

CHAIN = 32  # sums of a step
EPS = 1e-6
LINK_BYTES_S, MEMORY_BYTES_S = 450e9, 4.3e12


def main() -> None:
    """Parses the command line, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512, 2048])
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--steps", type=int, default=20, help="of the loop of one program")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skews", type=int, default=0, help="launches with ranks far apart")
    args = parser.parse_args()
    mesh = sharding.make_mesh(args.tp, device.every())
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
            run = _program(mesh, buffers if name == "mosaic_gpu" else None, args.steps)
            arrays = _arrays(mesh, tokens, width)
            result, returned_s, whole_s = _timed(run, arrays, args.repeats)
            found[name] = _same_on_all(result)
            first = found[names[0]]
            same = "equal" if np.array_equal(found[name], first) else "DIFFERENT"
            out(f"{tokens:5d} {width:5d} {name:14s} {whole_s / args.steps / CHAIN * 1e6:9.2f} ")
            out(f"{_floor_us(tokens, width, args.tp):6.2f} {returned_s * 1e3:10.2f} ")
            out(f"{whole_s * 1e3:8.2f}  {same}\n")
    if args.skews and buffers:
        _skewed(mesh, buffers, args.skews)
        out(f"{args.skews} launches with ranks up to 2 ms apart: all bits equal\n")


def _program(mesh, buffers, steps: int, *, waits: bool = False) -> Callable[..., jax.Array]:
    """Returns a function of (parts [tp, T, D], weight [D], turns [tp]) -> [T, D] of every rank."""
    peers = None if buffers is None else buffers.peers

    def on_rank(parts, weight, turns, peers):
        part = parts[0]
        if peers is not None:
            peers = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim == 2 and leaf.shape[1] == 1 else
                                 leaf, peers)  # fmt: skip
        if waits:
            part = part + _idle(turns[0]).astype(part.dtype)
        add = functools.partial(
            pallas_kernels.all_reduce_add_rms_norm, eps=EPS, axis_name=sharding.AXIS, peers=peers
        )

        def step(_, x):
            for _ in range(CHAIN):
                _, normed = add(x, (part,), weight)
                x = normed
            return x

        return jax.lax.fori_loop(0, steps, step, jnp.zeros_like(part))[None]

    split, whole = sharding.SPLIT, sharding.REPLICATED
    specs = None if peers is None else jax.tree.map(lambda leaf: leaf.sharding.spec, peers)
    run = jax.jit(
        jax.shard_map(
            on_rank, mesh=mesh, in_specs=(split, whole, split, specs), out_specs=split,
            check_vma=False,
        )
    )  # fmt: skip
    return lambda parts, weight, turns: run(parts, weight, turns, peers)


def _idle(turns: jax.Array) -> jax.Array:
    """Returns 0 after `turns` rounds of work that nothing else waits for."""
    wide = jnp.full((256, 256), 1e-3, jnp.float32)
    work = jax.lax.fori_loop(0, turns, lambda _, x: x @ x, wide)
    return jnp.sum(work) * 0


def _arrays(mesh, tokens: int, width: int, turns: np.ndarray | None = None):
    rng = np.random.default_rng(tokens + width)
    tp = mesh.devices.size
    parts = rng.normal(size=(tp, tokens, width)).astype(jnp.bfloat16)
    turns = np.zeros(tp, np.int32) if turns is None else turns
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, sharding.SPLIT))
    whole = NamedSharding(mesh, sharding.REPLICATED)
    weight = jax.device_put(rng.normal(size=(width,)).astype(jnp.bfloat16), whole)
    return put(parts), weight, put(turns)


def _timed(run: Callable[..., jax.Array], arrays, repeats: int) -> tuple[jax.Array, float, float]:
    """Returns the result, and the medians of when the call returned and when it had ended."""
    result = jax.block_until_ready(run(*arrays))
    returned, ended = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        result = run(*arrays)
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


def _skewed(mesh, buffers, count: int) -> None:
    run = _program(mesh, buffers, 2, waits=True)
    rng, expected = np.random.default_rng(0), None
    for _ in tqdm(range(count), desc="skews", disable=None):
        turns = rng.integers(0, 200, mesh.devices.size).astype(np.int32)
        found = _same_on_all(run(*_arrays(mesh, 32, 2048, turns)))
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected)


def _floor_us(tokens: int, width: int, tp: int) -> float:
    row_bytes = 2 * tokens * width
    return max((tp - 1) * row_bytes / LINK_BYTES_S, 4 * row_bytes / MEMORY_BYTES_S) * 1e6


if __name__ == "__main__":
    main()
