"""One table of image serving over HTTP: with step-level batching, and with batches of one.

    python scripts/bench_images_report.py --model-path configs/z-image-turbo --load-format dummy

Starts a server for each of the two (one after the other, as both need the device), prints how long
its start took, and measures
  - images of one size in a closed loop, at several concurrencies,
  - a mixed load (sizes and steps) in a closed loop,
  - the mixed load with Poisson arrivals, at shares of the throughput that the first server reached
    in its last closed loop; both servers get the same rates.
Prints one table; --output-file gets a line for each row, --plot-file NAME a plot.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import started_server

from jdllm.bench import tables
from jdllm.bench.images import __main__, load, runs, targets
from jdllm.bench.images import tables as image_tables
from jdllm.plots import batching, style

# The compiled numbers of images in a step (`engine/start/images/build.py`); requests of a warm-up
# take enough steps to meet, however they arrive.
ROWS, MEETING_STEPS = (1, 2, 4, 8, 12), 4


def main() -> None:
    """Measures both servers and prints the table."""
    args = parse_args()
    if args.plot_file:
        style.check_installed()
    began_s = time.monotonic()
    results: list[dict[str, Any]] = []
    rates: list[float] = []
    for name, flags in ((__main__.ON, []), (__main__.OFF, ["--batching-max-size", "1"])):
        if time.monotonic() - began_s > args.time_limit_s:
            print(f"# no time is left for: {name}", flush=True)
            break
        with started_server.started(
            server_flags(args, flags), log_file=args.log_file, limit_s=args.start_limit_s
        ) as server:
            target, start_s = targets.Http(server.client, server.model), server.start_s
            print(f"# {name}: ready after {start_s:.1f} s", flush=True)
            places = [*args.concurrency, *args.mixed_concurrency]
            # Poisson arrivals meet in any number.
            counts = row_counts([*places, *(ROWS if args.loads else ())])
            counts = counts if name == __main__.ON else [1]
            for result in measured(target, args, rates, counts):
                results.append({"batching": name, "start_up_s": start_s, **result})
                row = image_tables.several_runs(results[-1:]).splitlines()[-1]
                print(f"{time.monotonic() - began_s:6.0f} s {row}", flush=True)
                tables.append(args.output_file, results[-1])
    print(f"# {' '.join(sys.argv)}\n# {json.dumps(results[0]['target'])}")
    print(image_tables.several_runs(results))
    print(f"# {time.monotonic() - began_s:.0f} s in all")
    if args.plot_file:
        print("# wrote", *batching.save(results, args.plot_file))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--size", type=int, default=512, help="of the loads of one size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 768, 1024], help="mixed")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8], help="mixed")
    parser.add_argument("--num-inference-steps", type=int, default=8, help="of one size")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 12])
    parser.add_argument("--mixed-concurrency", type=int, nargs="*", default=[4, 12])
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.8, 0.95])
    parser.add_argument(
        "--closed-prompts",
        type=int,
        nargs="+",
        help="of each closed load of one size (default: 16 and 4 for each client)",
    )
    parser.add_argument("--num-prompts", type=int, default=64, help="of each mixed load")
    parser.add_argument("--poisson-prompts", type=int, default=32, help="of each Poisson load")
    parser.add_argument(
        "--most-captions",
        type=int,
        default=1,
        help="joined in a prompt; above 1 only with a real tokenizer (see image_load.py)",
    )
    parser.add_argument("--extra-body", type=json.loads, default={}, help="JSON, of every request")
    parser.add_argument("--start-limit-s", type=float, default=900.0)
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="start no second one")
    parser.add_argument("--output-file", metavar="JSONL")
    parser.add_argument("--plot-file", metavar="NAME")
    parser.add_argument("--log-file", default="bench-images-server.log", help="of the servers")
    parser.add_argument(
        "--server-flags", nargs=argparse.REMAINDER, default=[], help="the rest goes to the server"
    )
    args = parser.parse_args()
    if args.closed_prompts and len(args.closed_prompts) != len(args.concurrency):
        parser.error("--closed-prompts takes a number for each of --concurrency")
    if args.loads and not args.mixed_concurrency:
        parser.error("--loads are shares of the last of --mixed-concurrency, which is empty")
    return args


def server_flags(args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Returns the flags of the server."""
    sizes = [f"{side}x{side}" for side in sorted({args.size, *args.sizes})]
    model = ["--model-path", args.model_path, "--load-format", args.load_format]
    # Of a flag that is given twice, the last one counts: the comparison is always the one named.
    return [*model, "--warmup-resolutions", *sizes, *args.server_flags, *flags]


def measured(
    target: targets.Target,
    args: argparse.Namespace,
    rates: list[float],
    counts: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Yields the figures of each load on one server.

    The warm-up sends each of `counts` requests at once.
    """
    same = load.Load(
        width=args.size,
        height=args.size,
        num_inference_steps=args.num_inference_steps,
        most_captions=args.most_captions,
        extra=args.extra_body,
    )
    mixed = load.Load(
        num_prompts=args.num_prompts,
        most_captions=args.most_captions,
        extra=args.extra_body,
        profiles=tuple(
            load.Profile(width=side, height=side, num_inference_steps=steps)
            for side in args.sizes
            for steps in args.steps
        ),
    )
    about = {"target": target.describe(), "load_share": None}
    began_s = time.monotonic()
    asks = [*same.asks(), *mixed.asks()]
    runs.warm_up(target, asks, counts=counts, steps=MEETING_STEPS)
    print(f"# warm after {time.monotonic() - began_s:.1f} s", flush=True)
    prompts = args.closed_prompts or [16 + 4 * places for places in args.concurrency]
    for places, count in zip(args.concurrency, prompts, strict=True):
        # About as long for each: more places make more images per second, but not many times more.
        # Several for each place, or the first and the last, whose steps have few rows, count much.
        asks = dataclasses.replace(same, num_prompts=count).asks()
        yield about | {"load": f"{args.size}², c={places}"} | closed(target, asks, places)
    capacity = math.nan
    for places in args.mixed_concurrency:
        found = closed(target, mixed.asks(), places)
        yield about | {"load": f"mixed, c={places}"} | found
        capacity = found["throughput_qps"]
    if not rates:
        rates += [share * capacity for share in args.loads]
    asks = dataclasses.replace(mixed, num_prompts=args.poisson_prompts).asks()
    for share, rate in zip(args.loads, rates, strict=True):
        how = runs.Traffic(request_rate=rate, max_concurrency=None, show_progress=False)
        name = f"mixed, {share:g} = {rate:.2f}/s"
        found = runs.measure(target, asks, how)
        yield about | {"load": name, "load_share": share} | found


def row_counts(concurrency: Sequence[int]) -> list[int]:
    """Returns the numbers of images that steps may have with so many requests at a time."""
    most = max(concurrency)
    return sorted({*(rows for rows in ROWS if rows <= most), *concurrency})


def closed(target: targets.Target, asks: Sequence[load.Ask], places: int) -> dict[str, Any]:
    how = runs.Traffic(max_concurrency=places, show_progress=False)
    return runs.measure(target, asks, how)


if __name__ == "__main__":
    main()
