"""What a step of a training run costs on this machine, and which kernels it is made of.

    python scripts/profile_training.py --config configs/train/nano.yaml --set data_workers=4

Takes the run's own batches and steps. After `--warm-steps` it times `--steps` of them, then traces
`--traced-steps`, and prints milliseconds per step, the share of the time in which a kernel ran, the
number of launched kernels, and the kernels that take longest. An image run is at its first stage,
so its flow is profiled with `--set vae_steps=0`, in untrained latents.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import tempfile
import time
from collections.abc import Sequence

import jax
import kernel_profile

from jdllm.train import checkpoints, clock, recipes


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, runs the steps, prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--import-state", type=pathlib.Path)
    parser.add_argument("--set", nargs="+", default=[], action="extend", metavar="KEY=VALUE")
    parser.add_argument("--warm-steps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--traced-steps", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=25, help="how many rows to print")
    args = parser.parse_args(argv)
    config = recipes.load(args.config, args.set)
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipes.build(config, pathlib.Path(folder))
        state = recipe.first_state()
        if args.import_state is not None:
            stem = args.import_state
            weights = recipe.weights_of(stem) if stem.is_dir() else checkpoints.import_parts(stem)
            state = recipe.adopt(weights)
        began = time.monotonic()
        batches = recipe.batches(state, clock.Passed())
        state = _run(recipe, state, batches, args.warm_steps)
        print(f"warm after {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        state = _run(recipe, state, batches, args.steps)
        ms = 1e3 * (time.monotonic() - began) / args.steps
        traces = pathlib.Path(folder) / "trace"
        with jax.profiler.trace(str(traces)):
            _run(recipe, state, batches, args.traced_steps)
        batches.close()
        (path,) = traces.rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        events = list(kernel_profile.kernel_events(data))
    _print(events, ms, recipe.batch_size, args)


def _run(recipe, state, batches, count):
    for _ in range(count):
        state, metrics = recipe.step(state, next(batches))
    jax.block_until_ready((state, metrics))
    return state


def _print(events, ms: float, rows: int, args: argparse.Namespace) -> None:
    steps = args.traced_steps
    busy = sum(nanoseconds for _, _, nanoseconds, _ in events) / 1e6 / steps
    print(
        f"{args.config.name} {' '.join(args.set)}: {ms:.2f} ms a step of {rows} rows, "
        f"{busy:.2f} ms in {len(events) / steps:.0f} kernels"
    )
    time_of, count_of = collections.Counter(), collections.Counter()
    for name, instruction, nanoseconds, _ in events:
        key = re.sub(r"[.\d]+$", "", instruction or name)[:50], name[:60]
        time_of[key] += nanoseconds
        count_of[key] += 1
    for key, nanoseconds in time_of.most_common(args.kernels):
        print(
            f"{nanoseconds / 1e6 / steps:8.3f} ms {count_of[key] / steps:6.0f} x  {'  '.join(key)}"
        )


if __name__ == "__main__":
    main()
