"""Times the ops of `pallas_kernels` at the shapes of the models, each beside its floor.

    python scripts/bench_kernels.py                     # all ops
    python scripts/bench_kernels.py --ops attention,prefill --implementations mosaic_gpu,cudnn

One compiled program runs the op many times. Each call takes its input from the result of the call
before, and its weights or K,V from the next of several sets. So XLA hoists nothing and the L2 cache
holds no input. The time of a call is that of a few queued programs over their calls, as a median.
`floors.py` defines the floors. "error" is ||out - reference|| / ||reference|| against the XLA
implementation in float32 on the same values (for the vocabulary "ids": the share of equal best ids,
and the largest difference of a statistic). Data are random; K,V past a row's end and unused pages
are NaN.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

import floors
import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import BF16, CASES, Case
from tqdm import tqdm

from pallas_kernels import device

_PROGRAM_MS = 20.0
_QUEUED = 3


def main() -> None:
    """Parses the command line, runs every case, prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--implementations", default="mosaic_gpu,cudnn,xla")
    parser.add_argument("--calls", type=int, default=4, help="calls in one compiled program")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rest", type=float, default=0.0, help="idle seconds before each repeat")
    parser.add_argument("--match", default="", help="only shapes that contain this text")
    parser.add_argument("--no-errors", action="store_true", help="times only")
    args = parser.parse_args()
    out = sys.stdout.write
    floors.measured_on(device.local_device().kind)
    out(
        f"# {' '.join(sys.argv)}\n# {device.local_device().kind}, jax {jax.__version__}, bfloat16\n"
    )
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

    A GPU that works without a pause lowers its clock within tens of milliseconds (H200: by a tenth
    for kernels that tensor cores bound). With `rest` seconds of idleness before each repeat, the
    time is that of a kernel that runs among others, as in a forward.

    Launching a program costs up to a millisecond that belongs to no call. So a program repeats its
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
    memory = compiled.memory_analysis()
    assert memory is not None  # GPUs report it
    return float(np.median(times[2:])), memory.temp_size_in_bytes


def _reference(case: Case) -> Any:
    """Returns the result of the XLA implementation on float32 copies of the same values."""

    def widen(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if leaf.dtype == BF16 else leaf

    carry, inputs = jax.tree.map(widen, (case.carry, case.sets[0]))
    with jax.default_matmul_precision("highest"):
        return jax.jit(functools.partial(case.call, implementation="xla"))(carry, inputs)


if __name__ == "__main__":
    main()
