"""The gain of overlap, of multi-step launches and of fused commit: each is switched off in turn.

    python scripts/bench_switches.py --model-path configs/llada2.0-mini --load-format dummy

All variants get the same load: prompts of random token ids and outputs of random lengths, which
arrive at random times (Poisson). A share of the requests decodes at the first of `--thresholds`,
the others at the second. The load runs through an engine in this process, with a thread for every
request. The engine decides round by round whether rounds overlap and how many steps a launch has,
so these variants share one engine, and `switch` sets its numbers between loads. Fused commit is
compiled, so the variant without it has another engine. The model must write block after block.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, cast

import numpy as np

from jdllm.bench import in_process, prompts, stats, traffic
from jdllm.engine.engine import Engine
from jdllm.options import config, sampling_params

STEPS = 4
# Fused commit -> variants: (name, overlap, steps of a launch).
VARIANTS = {
    True: (
        ("default", True, STEPS),
        ("no overlap", False, STEPS),
        ("one step a launch", True, 1),
        ("neither", False, 1),
    ),
    False: (("no fused commit", True, STEPS),),
}
# (heading, key of the result, format).
COLUMNS = (
    ("seconds", "duration", "7.2f"),
    ("out tok/s", "output_throughput", "9.1f"),
    ("TTFT ms p50", "median_ttft_ms", "11.0f"),
    ("p99", "p99_ttft_ms", "6.0f"),
    ("E2E ms p50", "median_e2e_latency_ms", "10.0f"),
    ("p99", "p99_e2e_latency_ms", "6.0f"),
    ("NFE", "mean_nfe", "6.1f"),
    ("forwards", "forwards", "8d"),
    ("tok/fwd", "tokens_per_forward", "7.1f"),
    ("padding", "padding_fraction", "7.1%"),
    ("idle", "device_idle_fraction", "6.2%"),
    ("preempted", "preemptions", "9d"),
    ("compiles", "jit_compiles", "8d"),
    ("failed", "failed", "6d"),
)


def main() -> None:
    """Parses the command line, runs every variant, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--input-len", type=int, nargs=2, default=[16, 4096], metavar="TOKENS")
    parser.add_argument("--output-len", type=int, nargs=2, default=[16, 1024], metavar="TOKENS")
    parser.add_argument("--request-rate", type=float, default=32.0, help="requests per second")
    parser.add_argument("--thresholds", type=float, nargs=2, default=[0.95, 0.0], metavar="P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-fused-off", action="store_true", help="spares a second start")
    parser.add_argument("--output-file", help="JSON lines, the results in full")
    args = parser.parse_args()
    out = sys.stdout.write
    out(f"# {' '.join(sys.argv)}\n")
    for is_fused in [True] if args.skip_fused_off else VARIANTS:
        began = time.monotonic()
        with in_process.open_engine(engine_config(args, is_fused)) as engine:
            found = in_process.surroundings(engine)
            out(f"{in_process.headline(found)}\n# ready in {time.monotonic() - began:.0f} s\n")
            run_variants(engine, args, is_fused)


def engine_config(args: argparse.Namespace, is_fused: bool) -> config.EngineConfig:
    return config.EngineConfig(
        model_path=args.model_path,
        load_format=args.load_format,
        context_length=args.context_length,
        max_running_requests=args.max_running_requests,
        num_continuous_decode_steps=STEPS,
        disable_fused_commit=not is_fused,
        skip_tokenizer_init=True,
        log_level="warning",
    )


def run_variants(engine: Engine, args: argparse.Namespace, is_fused: bool) -> None:
    """Sends the load once per variant and prints a row for each."""
    out = sys.stdout.write
    load = draw(args, engine)
    send(engine, load[:8], [0.0] * len(load[:8]))  # warms up
    out(" " * 18 + " ".join(_head(column) for column in COLUMNS) + "\n")
    for name, overlaps, steps in VARIANTS[is_fused]:
        switch(engine, overlaps=overlaps, steps=steps)
        engine.flush_cache()
        at_s = traffic.arrivals_s(len(load), args.request_rate, args.seed)
        result = send(engine, load, at_s)
        out(f"{name:18s}" + " ".join(_cell(column, result) for column in COLUMNS) + "\n")
        sys.stdout.flush()
        if args.output_file:
            with open(args.output_file, "a") as file:
                file.write(json.dumps({"variant": name, **result}) + "\n")


Query = tuple[prompts.Prompt, float]  # a prompt and its threshold


def draw(args: argparse.Namespace, engine: Engine) -> list[Query]:
    """Returns prompts with random lengths, uniformly distributed, and random thresholds."""
    rng = np.random.default_rng(args.seed)
    found = []
    for _ in range(args.num_prompts):
        input_len, output_len = (
            int(rng.integers(low, high + 1)) for low, high in (args.input_len, args.output_len)
        )
        (ids,) = in_process.random_ids(rng, engine, 1, input_len)
        found.append(prompts.Prompt(content=ids, prompt_len=input_len, output_len=output_len))
    thresholds = rng.choice(args.thresholds, args.num_prompts).tolist()
    return list(zip(found, thresholds, strict=True))


def send(engine: Engine, load: list[Query], at_s: list[float]) -> dict[str, Any]:
    """Sends the prompts at their times; returns the figures of the load."""

    def send_one(query: Query) -> stats.Record:
        prompt, threshold = query
        params = sampling_params.SamplingParams(
            max_new_tokens=prompt.output_len,
            temperature=0.0,
            ignore_eos=True,
            dllm=sampling_params.DllmParams(threshold=threshold),
        )
        ids = cast(list[int], prompt.content)  # as `draw` makes it
        (record,), _ = in_process.generate(engine, [ids], [params])
        return record

    before = engine.server_info()["internal_states"][0]
    records, duration_s = traffic.send(send_one, load, at_s=at_s, show_progress=False)
    after = engine.server_info()["internal_states"][0]
    found = stats.summarize(records, duration_s)
    return found | stats.engine_figures(before, after, found["total_output_tokens"])


def switch(engine: Engine, *, overlaps: bool, steps: int) -> None:
    """Sets what `--disable-overlap-schedule` and `--num-continuous-decode-steps` set at start."""
    core = engine._built.core
    while core.has_work:  # the last round, which only reads results
        time.sleep(0.01)
    rows = core.scheduler.rows
    for owner, name, value in (
        (core, "_overlaps", overlaps),
        (rows, "_decode_steps", steps),
        (rows, "_blocks_ahead", steps * (1 + overlaps)),
    ):
        if not hasattr(owner, name):  # setattr would make an attribute that nobody reads
            raise AttributeError(f"{type(owner).__name__} has no {name}")
        setattr(owner, name, value)


def _head(column: tuple[str, str, str]) -> str:
    name, _, form = column
    return f"{name:>{form.partition('.')[0].rstrip('d')}s}"


def _cell(column: tuple[str, str, str], result: dict[str, Any]) -> str:
    _, key, form = column
    value = result[key]
    return _head(("-", key, form)) if value is None else format(value, form)


if __name__ == "__main__":
    main()
