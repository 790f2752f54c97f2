"""Times the ops of `pallas_kernels` at the shapes of the models, each beside its floor.

    python scripts/bench_kernels.py                     # all ops
    python scripts/bench_kernels.py --ops attention,prefill --implementations mosaic_gpu,cudnn

One compiled program runs the op many times, each call taking its input from the result of the one
before and its weights or K,V from another of several sets, so that nothing is hoisted and the L2
cache holds no input; the time is the median of a few queued programs over their calls. Floors are
those of `floors.py`. "error" is ||out - reference|| / ||reference|| against the XLA implementation
in float32 on the same values ("ids" for the vocabulary: the share of equal best ids, and the
largest difference of a statistic). Random data; K,V past a row's end and unused pages are NaN.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import floors
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import pallas_kernels

BF16 = jnp.bfloat16
L2_BYTES = 60e6
_PROGRAM_MS = 20.0
_QUEUED = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op at one shape.

    `call(carry, inputs, implementation)` returns the next carry; `inputs` is one of `sets`.
    `compare(result, reference)` says how close they are.
    """

    op: str
    shape: str
    work: floors.Work
    implementations: tuple[str, ...]
    carry: Any
    sets: tuple[Any, ...]
    call: Callable[[Any, Any, str], Any]
    compare: Callable[[Any, Any], str]


def main() -> None:
    """Parses the command line, runs every case, prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--implementations", default="mosaic_gpu,cudnn,xla")
    parser.add_argument("--calls", type=int, default=4, help="calls in one compiled program")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rest", type=float, default=0.0, help="idle seconds before each repeat")
    parser.add_argument("--match", default="", help="only shapes that contain this text")
    parser.add_argument("--no-errors", action="store_true", help="times only")
    args = parser.parse_args()
    device, out = jax.local_devices()[0], sys.stdout.write
    out(f"# {' '.join(sys.argv)}\n# {device.device_kind}, jax {jax.__version__}, bfloat16\n")
    out(f"{'op':10s} {'shape':44s} {'implementation':14s} {'ms':>8s} {'floor':>7s} {'ratio':>6s}")
    out(f" {'TB/s':>5s} {'TFLOP/s':>7s} {'temp MB':>8s}  error\n")
    wanted = args.implementations.split(",")
    for op in args.ops.split(","):
        for build in tqdm(CASES[op], desc=op, disable=None):
            if args.match not in str(build.keywords):
                continue
            case = build()
            reference = None if args.no_errors else _reference(case)
            for implementation in case.implementations:
                if implementation in wanted:
                    out(_row(case, implementation, reference, args) + "\n")
                    sys.stdout.flush()
            jax.clear_caches()


def _row(case: Case, implementation: str, reference: Any, args: argparse.Namespace) -> str:
    head = f"{case.op:10s} {case.shape:44s} {implementation:14s}"
    try:
        ms, temp = time_case(case, implementation, args.calls, args.repeats, args.rest)
        error = "-"
        if reference is not None:
            one = jax.jit(functools.partial(case.call, implementation=implementation))
            error = case.compare(one(case.carry, case.sets[0]), reference)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as refused:
        return f"{head} {str(refused).splitlines()[0][:110]}"
    floor, work = case.work.floor_ms, case.work
    return (
        f"{head} {ms:8.4f} {floor:7.4f} {ms / floor:6.2f} {work.bytes / ms / 1e9:5.2f} "
        f"{work.flops / ms / 1e9:7.0f} {temp / 1e6:8.1f}  {error}"
    )


def time_case(
    case: Case, implementation: str, calls: int, repeats: int, rest: float = 0.0
) -> tuple[float, int]:
    """Returns (milliseconds a call, bytes of temporaries of the program).

    A GPU that works without a pause lowers its clock within tens of milliseconds (H200: by a
    tenth for kernels bound by tensor cores); `rest` seconds of idleness before each repeat give the
    figure of a kernel that runs among others, as in a forward.

    Launching a program costs up to a millisecond that belongs to no call: a program repeats its
    calls until it should last `_PROGRAM_MS`, and several are queued before the clock is read.
    """
    calls = max(calls, len(case.sets))  # every set takes part
    rounds = int(np.clip(_PROGRAM_MS / (2 * calls * case.work.floor_ms), 1, 256))

    def program(carry: Any, sets: tuple[Any, ...]) -> Any:
        def one_round(_: Any, carry: Any) -> Any:
            for index in range(calls):
                carry = case.call(carry, sets[index % len(sets)], implementation)
            return carry

        return jax.lax.fori_loop(0, rounds, one_round, carry)

    compiled = jax.jit(program).lower(case.carry, case.sets).compile()
    times = []
    for _ in range(repeats + 2):  # the first two warm up
        time.sleep(rest)
        began = time.perf_counter()
        carry = case.carry
        for _ in range(_QUEUED):
            carry = compiled(carry, case.sets)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - began) * 1e3 / (calls * rounds * _QUEUED))
    return float(np.median(times[2:])), compiled.memory_analysis().temp_size_in_bytes


def _reference(case: Case) -> Any:
    """The XLA implementation on float32 copies of the same values."""

    def widen(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if leaf.dtype == BF16 else leaf

    carry, inputs = jax.tree.map(widen, (case.carry, case.sets[0]))
    with jax.default_matmul_precision("highest"):
        return jax.jit(functools.partial(case.call, implementation="xla"))(carry, inputs)


def _relative_error(result: Any, reference: Any) -> str:
    result, reference = result.astype(jnp.float32), reference.astype(jnp.float32)
    error = jnp.linalg.norm((result - reference).ravel()) / jnp.linalg.norm(reference.ravel())
    return f"{float(error):.1e}"


def _normal(seed: int, *shape: int, std: float = 1.0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, BF16) * jnp.asarray(std, BF16)


def _num_sets(bytes_of_one: float) -> int:
    return int(min(8, max(2, -(-3 * L2_BYTES // bytes_of_one))))


def moe(*, T: int, E: int = 256, k: int = 8, D: int = 2048, I: int = 512) -> Case:  # noqa: E741
    """One mixture-of-experts layer under uniform routing."""
    rng = np.random.default_rng(0)

    def one(seed: int) -> dict[str, jax.Array]:
        ids = np.argsort(rng.random((T, E)), axis=1)[:, :k].astype(np.int32)
        weights = rng.uniform(0.1, 1.0, (T, k)).astype(np.float32)
        return {
            "w_gate_up": _normal(seed, E, 2 * I, D, std=D**-0.5),
            "w_down": _normal(seed + 100, E, D, I, std=I**-0.5),
            "expert_ids": jnp.asarray(ids),
            "expert_weights": jnp.asarray(2.5 * weights / weights.sum(1, keepdims=True)),
        }

    sets = tuple(one(seed) for seed in range(2))
    hit = np.mean([len(np.unique(one_set["expert_ids"])) for one_set in sets])

    def call(x: jax.Array, inputs: dict[str, jax.Array], implementation: str) -> jax.Array:
        return pallas_kernels.grouped_matmul(
            x,
            **inputs,
            valid=jnp.ones(x.shape[:1], bool),
            out_dtype=x.dtype,
            implementation=implementation,
        )

    return Case(
        op="moe",
        shape=f"T={T} E={E} top-{k} D={D} I={I}, {hit:.0f} hit",
        work=floors.experts(T, hit=float(hit), experts_per_token=k, expert_params=3 * D * I),
        implementations=("mosaic_gpu", "xla"),
        carry=_normal(9, T, D),
        sets=sets,
        call=call,
        compare=_relative_error,
    )


def attention(
    *, B: int, S: int, L: int = 32, N: int = 16, K: int = 4, H: int = 128, page: int = 64,
    block: int = 32,
) -> Case:  # fmt: skip
    """B rows of L in-flight tokens, the last of S keys each; prefill when L is S."""
    M = -(-S // page)
    rng = np.random.default_rng(0)
    table = rng.permutation(B * M).astype(np.int32).reshape(B, M)
    dead = np.arange(M * page).reshape(M, 1, page, 1) >= S  # of a row's pages

    def pool(seed: int) -> jax.Array:
        values = _normal(seed, B * M, 2, K, page, H)
        rows = jnp.where(dead[None, :, None], jnp.asarray(jnp.nan, BF16), values[table])
        return values.at[table].set(rows)

    sets = tuple(pool(seed) for seed in range(_num_sets(B * S * K * H * 4)))
    first_block = (S - L) // block + 1
    seen = sum(min(S, (first_block + i) * block) for i in range(L // block)) * block

    def call(q: jax.Array, kv_pool: jax.Array, implementation: str) -> jax.Array:
        pages = jnp.asarray(table)
        if implementation != "mosaic_gpu":  # or XLA would gather a set's pages once for all calls
            pages = pages + jnp.isnan(q[0, 0, 0]).astype(jnp.int32)
        return pallas_kernels.extend_attention(
            q,
            kv_pool,
            jnp.arange(B + 1, dtype=jnp.int32) * L,
            jnp.full((B,), S - L, jnp.int32),
            jnp.full((B,), S, jnp.int32),
            pages,
            visibility="block_causal",
            block_size=block,
            scale=H**-0.5,
            q_len=None if L == S else L,
            implementation=implementation,
        )

    return Case(
        op="prefill" if L == S else "attention",
        shape=f"B={B} L={L} S={S} heads {N}/{K}x{H} page {page}",
        work=floors.attention(
            scores=B * seen, kv_tokens=B * S, query_heads=N, kv_heads=K, head_dim=H
        ),
        implementations=("mosaic_gpu", "xla") if L == S else ("mosaic_gpu", "cudnn", "xla"),
        carry=_normal(99, B * L, N, H),
        sets=sets,
        call=call,
        compare=_relative_error,
    )


def cudnn_dense(*, B: int, S: int, L: int = 32, N: int = 16, K: int = 4, H: int = 128) -> Case:
    """What cuDNN takes for the same rows if K and V lie dense: no paging, no gather."""
    sets = tuple(
        (_normal(seed, B, S, K, H), _normal(seed + 50, B, S, K, H))
        for seed in range(_num_sets(B * S * K * H * 4))
    )

    def call(q: jax.Array, inputs: tuple[jax.Array, jax.Array], implementation: str) -> jax.Array:
        return jax.nn.dot_product_attention(q, *inputs, implementation=implementation)

    return Case(
        op="dense",
        shape=f"B={B} L={L} S={S} heads {N}/{K}x{H}, contiguous K,V",
        work=floors.attention(
            scores=B * L * S, kv_tokens=B * S, query_heads=N, kv_heads=K, head_dim=H
        ),
        implementations=("cudnn",),
        carry=_normal(99, B, L, N, H),
        sets=sets,
        call=call,
        compare=_relative_error,
    )


def unembed(*, T: int, V: int = 157184, D: int = 2048, draws: bool = False) -> Case:
    """The LM head's statistics of T tokens: a forbidden id, a given id a row, maybe a draw."""
    x = _normal(7, T, D)
    drawing = {
        "draw_keys": jax.random.bits(jax.random.key(8), (T, 2), jnp.uint32),
        "temperature": jnp.full((T,), 0.8, jnp.float32),
    }
    sets = tuple(_normal(seed, V, D, std=D**-0.5) for seed in range(2))

    def call(carry: Any, w: jax.Array, implementation: str) -> Any:
        given_ids, before = carry
        states = x.astype(w.dtype)
        if implementation != "mosaic_gpu":  # or XLA would multiply once for all calls
            states = states * jnp.where(jnp.isnan(before[0]), 2, 1).astype(w.dtype)
        stats = pallas_kernels.unembed_stats(
            states,
            w,
            forbidden_ids=(V - 5,),
            given_ids=given_ids,
            implementation=implementation,
            **(drawing if draws else {}),
        )
        return stats.best_id, stats.logsumexp + stats.entropy + stats.second_logit

    def compare(result: Any, reference: Any) -> str:
        same = float((result[0] == reference[0]).mean())
        return f"ids {same:.4f}, statistics {float(jnp.abs(result[1] - reference[1]).max()):.1e}"

    no_ids = jnp.zeros((T,), jnp.int32), jnp.zeros((T,), jnp.float32)
    return Case(
        op="unembed",
        shape=f"T={T} V={V} D={D}" + (" with a draw" if draws else ""),
        work=floors.matmul(T, V * D),
        implementations=("mosaic_gpu", "xla"),
        carry=no_ids,
        sets=sets,
        call=call,
        compare=compare,
    )


def _cases(build: Callable[..., Case], *shapes: dict[str, int]) -> list[Any]:
    return [functools.partial(build, **shape) for shape in shapes]


def _rows(**of: Any) -> Iterator[dict[str, int]]:
    (name, values), *fixed = of.items()
    for value in values:
        yield {name: value} | dict(fixed)


CASES: dict[str, list[Any]] = {
    "moe": _cases(
        moe,
        *_rows(T=(32, 128, 512, 2048, 8192, 16384)),
        *_rows(T=(32, 512), D=4096, I=1024),  # LLaDA2.0-flash
        *_rows(T=(32, 256), E=128, D=2048, I=768),  # SDAR-30B-A3B
    ),
    "attention": _cases(
        attention,
        *_rows(B=(1, 4, 16, 64), S=2048),
        *_rows(B=(1, 4), S=4096),
        *_rows(B=(1, 4, 16, 64), S=544),
        *_rows(B=(1, 4, 16), S=544, N=32, K=32),  # LLaDA-8B
        *_rows(B=(4, 64), S=2048, L=4, block=4, N=32, K=8),  # SDAR-8B
        {"B": 16, "S": 2048, "L": 64},  # two in-flight blocks
    ),
    "dense": _cases(cudnn_dense, *_rows(B=(16, 64), S=2048)),
    "prefill": _cases(
        attention,
        {"B": 1, "S": 8192, "L": 8192, "N": 32, "K": 32},
        {"B": 8, "S": 2048, "L": 2048, "N": 32, "K": 32},
        {"B": 1, "S": 8192, "L": 8192, "N": 16, "K": 4},
        {"B": 8, "S": 2048, "L": 2048, "N": 16, "K": 4},
    ),
    "unembed": _cases(
        unembed,
        *_rows(T=(32, 64, 128, 256, 512, 1024, 2048)),
        *_rows(T=(32, 128, 512), V=126464, D=4096),  # LLaDA-8B
        *_rows(T=(32, 512), draws=True),
    ),
}


if __name__ == "__main__":
    main()
