"""`python -m jdllm.bench.one_batch`: latency of a closed batch through the real engine.

Flags and fields are those of SGLang's `bench_one_batch`. All requests of a batch arrive at once,
have equal lengths, are greedy and ignore EOS. The fields mean:

* `prefill_latency`: seconds until every row has its first token. It is measured with requests
  for one token and the option with which a forward writes a whole block (threshold 0, of entropy
  the highest; else one denoising step), so it is all of prefill and the first forward of decode.
  Options that exclude a threshold, such as another rule than by confidence, do not hold for them.
* `mean_decode_latency`: seconds per decode forward. It is `total_latency` minus
  `prefill_latency`, divided by the further forwards of the batch (or by those of its longest
  row, if the engine does not count those of the batch).
* `median_decode_latency`: for each row, the time between the first and the last arrival of
  blocks, divided by the forwards between them; of these, the median over the rows. Blocks of one
  launch arrive together; if all blocks do, the field is the mean above.
* `total_latency`: seconds of the whole batch, prefill included.

On random weights `--threshold 0.95` gives one token per forward and `--threshold 0` a whole block.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.bench import command_line, in_process, stats, tables
from jdllm.engine.engine import Engine
from jdllm.host import progress
from jdllm.options import config, sampling_params

WARMUP_TOKENS = 64
CONTEXT_MULTIPLE = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when nothing could be measured, 2 for a wrong option, 130 for Ctrl-C."""
    return command_line.finish("one_batch", lambda: run(parse_args(argv)))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("one_batch", __doc__)
    many = {"type": command_line.positive, "nargs": "+", "metavar": "N"}
    parser.add_argument("--batch-size", "--batch", default=[1], help="requests", **many)
    parser.add_argument("--input-len", default=[1024], help="tokens of a prompt", **many)
    parser.add_argument("--output-len", default=[16], help="tokens of an output", **many)
    parser.add_argument(
        "--threshold",
        type=command_line.share,
        nargs="+",
        default=[None],
        metavar="P",
        help="tokens with this confidence are written (default: the model's)",
    )
    command_line.add_dllm_flag(parser)
    parser.add_argument(
        "--repeats", type=command_line.positive, default=1, help="runs; their median is reported"
    )
    parser.add_argument("--seed", type=command_line.natural, default=42, help="of the prompts")
    parser.add_argument("--run-name", default="default", help="put into the result")
    parser.add_argument("--result-filename", default="result.jsonl", help="JSON lines; '' for none")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    command_line.add_engine_flags(parser)
    return command_line.parse(parser, argv)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures every combination of the lists, prints and appends each result; returns them."""
    check(options)
    with in_process.open_engine(engine_config(options)) as engine:
        return run_on(engine, options)


def check(options: argparse.Namespace) -> None:
    """Raises a ConfigError for options that cannot be measured, before an engine is built."""
    tables.check_writable(options.result_filename)
    dllm = command_line.dllm_options(options.dllm)
    if "threshold" in dllm and options.threshold != [None]:
        raise errors.ConfigError("--threshold and --dllm threshold=... disagree; give one")
    sampling_params.DllmParams.from_mapping(dllm)


def run_on(engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Does what `run` does with an engine of `engine_config(options)`, which `check` has passed."""
    dllm = command_line.dllm_options(options.dllm)
    points = list(
        itertools.product(
            options.threshold, options.batch_size, options.input_len, options.output_len
        )
    )
    rng = np.random.default_rng(options.seed)
    results = []
    if max(options.batch_size) > engine.max_running_requests:
        raise errors.ConfigError(
            f"--batch-size {max(options.batch_size)} exceeds --max-running-requests "
            f"{engine.max_running_requests}"
        )
    # What cannot go together is refused before anything is measured.
    resolved = {one: _resolved(engine, _with_threshold(dllm, one)) for one in options.threshold}
    found = in_process.surroundings(engine)
    found["distinct_experts"] = in_process.distinct_experts(engine, rng)
    tables.say(in_process.headline(found))
    tables.say(f"# distinct experts per layer, one block: {found['distinct_experts']}")
    for threshold, batch_size, input_len, output_len in progress.bar(
        points, is_shown=not options.disable_tqdm, unit="point"
    ):
        one = _with_threshold(dllm, threshold)
        prompts = in_process.random_ids(rng, engine, batch_size, input_len)
        measured = measure(engine, prompts, output_len, one, options.repeats)
        results.append(
            {
                "run_name": options.run_name,
                "batch_size": batch_size,
                "input_len": input_len,
                "output_len": output_len,
                "threshold": resolved[threshold].threshold,
                **measured,
                **found,
            }
        )
        tables.say(lines(results[-1]))
        tables.append(options.result_filename, results[-1])
    return results


def engine_config(options: argparse.Namespace) -> config.EngineConfig:
    """Returns the engine's options; rows and context are as large as the lists need."""
    longest = max(options.input_len) + max(options.output_len)
    return command_line.engine_config(
        options,
        max_running_requests=max(options.batch_size),
        context_length=-(-longest // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE,
        skip_tokenizer_init=True,
        disable_radix_cache=True,
    )


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    dllm: dict[str, Any],
    repeats: int,
) -> dict[str, Any]:
    """Returns the figures of one closed batch: the median of `repeats` runs, after a warm-up."""
    _closed_batch(engine, prompts, min(output_len, WARMUP_TOKENS), dllm)
    algorithm = _resolved(engine, dllm).declared
    assert algorithm is not None, "resolved options name it"
    at_once = whole_block(algorithm, dllm)
    prefills = [_closed_batch(engine, prompts, 1, at_once) for _ in range(repeats)]
    prefill = _median(prefills)
    prefill_s = prefill[1]
    runs = [_closed_batch(engine, prompts, output_len, dllm) for _ in range(repeats)]
    decode = _median(runs)
    records, total_s, engine_figures = decode
    prompt_tokens = sum(map(len, prompts))
    figures = stats.summarize(records, total_s)
    output_tokens = figures["total_output_tokens"]
    mean_s = _mean_decode_latency_s(prefill, decode)
    rows = [seconds for one in records if (seconds := one.mean_interval_s("nfe")) is not None]
    forward_s = statistics.median(rows) if rows else mean_s
    tpf = figures["tpf"]
    return {
        "prefill_latency": prefill_s,
        "prefill_throughput": prompt_tokens / prefill_s,
        "mean_decode_latency": mean_s,
        "median_decode_latency": forward_s,
        "median_decode_throughput": forward_s and len(prompts) * tpf / forward_s,
        "total_latency": total_s,
        "overall_throughput": (prompt_tokens + output_tokens) / total_s,
        "output_throughput": output_tokens / total_s,
        "total_latencies": [seconds for _, seconds, _ in runs],
        **{key: figures[key] for key in stats.denoising([])},
        **{key: figures[key] for key in ("median_ttft_ms", "median_inter_block_latency_ms")},
        **engine_figures,
    }


Run = tuple[list[stats.Record], float, dict[str, Any]]  # records, seconds, the engine's counters


def _closed_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    dllm: dict[str, Any],
) -> Run:
    params = sampling_params.SamplingParams(
        max_new_tokens=output_len,
        temperature=0.0,
        ignore_eos=True,
        dllm=sampling_params.DllmParams.from_mapping(dllm),
    )
    before = engine.server_info()["internal_states"][0]
    records, seconds = in_process.generate(engine, prompts, [params] * len(prompts))
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise command_line.BenchError(f"{len(failed)} requests failed; the first: {failed[0]}")
    after = engine.server_info()["internal_states"][0]
    tokens = sum(record.completion_tokens for record in records)
    return records, seconds, stats.engine_figures(before, after, tokens)


def _median(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda one: one[1])[len(runs) // 2]


def _mean_decode_latency_s(prefill: Run, whole: Run) -> float | None:
    """Returns seconds per decode forward that `whole` has more than `prefill`; None without any."""
    forwards = _forwards(whole) - _forwards(prefill)
    seconds = whole[1] - prefill[1]
    return seconds / forwards if forwards > 0 and seconds > 0 else None


def _forwards(run: Run) -> int:
    records, _, figures = run
    return figures["forwards"] or max(record.nfe or 0 for record in records)


def whole_block(algorithm: lookup.Algorithm, dllm: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with which a forward writes all positions of a block, where there are such.

    They are those of `dllm` but for what goes with no threshold: its alternatives, and the options
    of another rule.
    """
    threshold = algorithm.option("threshold")
    if threshold is None:
        one_step = algorithm.option("max_denoising_steps") is not None
        return {**dllm, **({"max_denoising_steps": 1} if one_step else {})}
    # The least probability, or the largest entropy.
    writes_all: dict[str, Any] = {"threshold": 0.0 if threshold.high == 1 else threshold.high}
    if threshold.only_with is not None:
        rule, words = threshold.only_with
        writes_all[rule] = words[0]
    options = {name: value for name, value in dllm.items() if name not in algorithm.alternatives}
    options |= writes_all
    without_meaning = algorithm.without_meaning(algorithm.defaults | options)
    return {name: options[name] for name in options.keys() - {one.name for one in without_meaning}}


def _with_threshold(dllm: dict[str, Any], threshold: float | None) -> dict[str, Any]:
    return dllm if threshold is None else dllm | {"threshold": threshold}


def _resolved(engine: Engine, dllm: Mapping[str, Any]) -> sampling_params.DllmParams:
    """Returns what the engine makes of options; raises a RequestError that names a wrong one."""
    default = engine.model_info()["preferred_sampling_params"]["dllm"]
    from_mapping = sampling_params.DllmParams.from_mapping
    return from_mapping(dllm).resolve(from_mapping(default))


def lines(result: dict[str, Any]) -> str:
    """Returns SGLang's three lines of a result, and one of ours."""
    show = lambda value, form: "n/a" if value is None else format(value, form)  # noqa: E731
    keys = ("batch_size", "input_len", "output_len", "threshold")
    return "\n".join(
        [
            ", ".join(f"{key}={result[key]}" for key in keys),
            f"Prefill. latency: {result['prefill_latency']:6.5f} s, "
            f"throughput: {result['prefill_throughput']:9.2f} token/s",
            f"Decode.  median latency: {show(result['median_decode_latency'], '6.5f')} s, "
            f"median throughput: {show(result['median_decode_throughput'], '9.2f')} token/s",
            f"Total. latency: {result['total_latency']:6.3f} s, "
            f"throughput: {result['overall_throughput']:9.2f} token/s",
            f"Output. throughput: {result['output_throughput']:9.2f} token/s, "
            f"TPF: {show(result['tpf'], '.2f')}, "
            f"NFE per request: {show(result['mean_nfe'], '.1f')}, "
            f"blocks per request: {show(result['mean_blocks'], '.1f')}, "
            f"forwards: {show(result['forwards'], 'd')}, "
            f"tokens per forward: {show(result['tokens_per_forward'], '.2f')}, "
            f"device idle: {show(result['device_idle_fraction'], '.2%')}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
