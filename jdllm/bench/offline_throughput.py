"""`python -m jdllm.bench.offline_throughput`: all prompts at once through the real engine.

Flags and fields are those of SGLang's `bench_offline_throughput`, with latencies, TPF, NFE and
blocks added. Prompts are given as token ids, so random lengths are exact.
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdllm import errors
from jdllm.bench import command_line, in_process, stats, tables
from jdllm.engine.engine import Engine
from jdllm.engine.tokenizer import Tokenizer
from jdllm.options import sampling_params

# SGLang's warm-up; `warm_up` cuts it to the context.
WARMUP_PROMPTS, WARMUP_INPUT, WARMUP_OUTPUT = 16, 256, 16
HEAD: tuple[tables.Row, ...] = (
    ("Backend:", "backend"),
    ("Successful requests:", "successful_requests"),
    ("Benchmark duration (s):", "total_latency"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Last generation throughput (tok/s):", "last_gen_throughput"),
    *tables.THROUGHPUTS,
    ("Total token throughput (tok/s):", "total_throughput"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when nothing could be measured, 2 for a wrong option, 130 for Ctrl-C."""
    return command_line.finish("offline_throughput", lambda: run(parse_args(argv)))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("offline_throughput", __doc__)
    parser.add_argument("--backend", choices=("engine",), default="engine", help="what runs")
    command_line.add_dataset_flags(parser)
    parser.add_argument("--disable-ignore-eos", action="store_true", help="answers may end early")
    parser.add_argument(
        "--extra-request-body", metavar="JSON", help="sampling parameters of every request"
    )
    command_line.add_dllm_flag(parser)
    parser.add_argument("--skip-warmup", action="store_true", help="measure from the first launch")
    parser.add_argument("--result-filename", default="", help="JSON lines; one is appended")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    command_line.add_engine_flags(parser)
    return command_line.parse(parser, argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints the table, appends the result to the file and returns it."""
    tables.check_writable(options.result_filename)
    base = sampling(options)
    # Made here for its checks alone, so that wrong flags are refused before any weight is read.
    command_line.dataset(options, as_ids=True, vocab_size=None)
    with in_process.open_engine(command_line.engine_config(options)) as engine:
        found = in_process.surroundings(engine)
        experts = in_process.distinct_experts(engine, np.random.default_rng(options.seed))
        tables.say(in_process.headline(found))
        tables.say(f"# distinct experts per layer, one block: {experts}")
        dataset = command_line.dataset(options, as_ids=True, vocab_size=engine.spec.vocab_size)
        asked = dataset.load(lambda: _tokenizer(engine))
        params = [
            sampling_params.SamplingParams.from_mapping({"max_new_tokens": one.output_len, **base})
            for one in asked
        ]
        if not options.skip_warmup:
            warm_up(engine, min(options.num_prompts, WARMUP_PROMPTS), base, options.seed)
        # A cast: with `as_ids` every content is token ids.
        ids = [typing.cast(list[int], one.content) for one in asked]
        before = engine.server_info()["internal_states"][0]
        records, seconds = in_process.generate(
            engine, ids, params, show_progress=not options.disable_tqdm
        )
        after = engine.server_info()["internal_states"][0]
        result = {
            **figures(records, seconds, before, after),
            **settings(options, base, len(asked)),
            "distinct_experts": experts,
            **found,
        }
    lines = ["", tables.title(" Offline Throughput Benchmark Result "), *tables.rows(result, HEAD)]
    lines += tables.sections(result, [("Denoising", tables.DENOISING), *tables.LATENCIES])
    tables.say("\n".join([*lines, tables.title("")]))
    tables.append(options.result_filename, result)
    return result


def figures(
    records: Sequence[stats.Record],
    seconds: float,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns SGLang's fields, then ours; `before` and `after` are the engine's counters."""
    failed = [record.error for record in records if record.error is not None]
    if len(failed) == len(records):
        raise command_line.BenchError(f"all {len(failed)} requests failed; the first: {failed[0]}")
    found = stats.summarize(records, seconds)
    return {
        "successful_requests": found.pop("completed"),
        "total_latency": found.pop("duration"),
        "last_gen_throughput": after["gen_throughput"],
        **found,
        **stats.engine_figures(before, after, found["total_output_tokens"]),
    }


def settings(options: argparse.Namespace, base: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns what identifies the load: `count` prompts with sampling parameters `base`."""
    return {
        "backend": options.backend,
        "dataset_name": options.dataset_name,
        "num_prompts": count,
        "random_input_len": options.random_input_len,
        "random_output_len": options.random_output_len,
        "random_range_ratio": options.random_range_ratio,
        "seed": options.seed,
        "sampling_params": base,
    }


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling parameters of every request, checked by the engine's own rules."""
    base = {"temperature": 0.0, "ignore_eos": not options.disable_ignore_eos}
    dllm = command_line.dllm_options(options.dllm)
    extra = command_line.json_object(options.extra_request_body, "--extra-request-body")
    params = command_line.merged(base | ({"dllm": dllm} if dllm else {}), extra)
    if sampling_params.SamplingParams.from_mapping(params).n != 1:
        raise errors.ConfigError("--extra-request-body asks for n above 1; only 1 is measured")
    return params


def warm_up(engine: Engine, count: int, base: dict[str, Any], seed: int) -> None:
    """Runs a few random prompts, then empties the prefix cache."""
    output_len = min(WARMUP_OUTPUT, engine.context_length // 2)
    input_len = min(WARMUP_INPUT, engine.context_length - output_len)
    rng = np.random.default_rng(seed + 1)
    params = sampling_params.SamplingParams.from_mapping({**base, "max_new_tokens": output_len})
    prompts = in_process.random_ids(rng, engine, count, input_len)
    in_process.generate(engine, prompts, [params] * count)
    engine.flush_cache()


def _tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise errors.ConfigError(
            "the engine has no tokenizer; use --dataset-name random-ids, or give --tokenizer-path"
        )
    return engine.tokenizer


if __name__ == "__main__":
    sys.exit(main())
