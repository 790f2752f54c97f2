"""`python -m jdllm.bench.serving`: load on a running server, over HTTP, with streaming.

Flags, table and result file are those of SGLang's `bench_serving`, with TPF, NFE and blocks
added. TTFT is the time to the first committed block.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from jdllm import errors
from jdllm.bench import (
    backends,
    command_line,
    prompts,
    running_server,
    server_flags,
    serving_options,
    stats,
    tables,
    traffic,
)
from jdllm.client import api, failures, transport
from jdllm.engine.tokenizer import Tokenizer

WARMUP_TOKENS = 32  # as SGLang


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when nothing could be measured, 2 for a wrong option, 130 for Ctrl-C."""
    return command_line.finish("serving", lambda: run(serving_options.parse(argv)))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints the table, appends the result to the file and returns it."""
    kind, _ = backends.BACKENDS[options.backend]
    serving_options.check(options)
    client = transport.Client(
        serving_options.base_url(options),
        headers=server_flags.headers(options),
        timeout_s=running_server.TIMEOUT_S,
    )
    path = options.output_file or serving_options.default_file(options)
    tables.check_writable(path)
    dataset = command_line.dataset(
        options, as_ids=options.tokenize_prompt, vocab_size=options.vocab_size
    )
    model = running_server.find_model(
        client,
        options.served_model_name or options.model,
        timeout_s=options.ready_check_timeout_sec,
    )
    tokenizer = functools.cache(lambda: load_tokenizer(client, options, model))
    asked = dataset.load(tokenizer)
    check_contents(asked, kind)
    request = serving_options.request(options, model)
    tables.say(f"# {command_line.shown(sys.argv)}\n# {client.base_url}, model {model}")
    warm_up(client, request, asked[0], options)
    before = running_server.server_info(client)
    records, duration_s = traffic.send(
        lambda prompt: backends.send(client, prompt, request),
        asked,
        at_s=traffic.arrivals_s(len(asked), options.request_rate, options.seed),
        max_concurrency=options.max_concurrency,
        show_progress=not options.disable_tqdm,
    )
    after = running_server.server_info(client)
    failed = [record.error for record in records if record.error is not None]
    if len(failed) == len(records):
        raise command_line.BenchError(f"all {len(failed)} requests failed; the first: {failed[0]}")
    result = {
        **serving_options.settings(options, model),
        **stats.summarize(records, duration_s),
        **_retokenized(records, tokenizer),
        **_cache(records),
        "server_info": after,
    }
    result |= stats.engine_figures(
        running_server.state(before), running_server.state(after), result["total_output_tokens"]
    )
    print_result(result, options)
    if failed:
        sys.stderr.write(f"{len(failed)} requests failed; the first: {failed[0]}\n")
    tables.append(path, result | (details(records) if options.output_details else {}))
    return result


def check_contents(asked: Sequence[prompts.Prompt], kind: api.Kind) -> None:
    """Refuses chat messages for a route that takes text, and ids for chat."""
    for prompt in asked:
        is_list = isinstance(prompt.content, list)
        is_messages = is_list and isinstance(prompt.content[0], dict)
        if is_messages and kind != "chat":
            raise errors.ConfigError(
                "the dataset holds chat messages; use --backend sglang-oai-chat, or "
                "--apply-chat-template"
            )
        if is_list and not is_messages and kind == "chat":
            raise errors.ConfigError("the dataset holds token ids, which chat does not take")


def load_tokenizer(client: transport.Client, options: argparse.Namespace, model: str) -> Tokenizer:
    """Returns the tokenizer of --tokenizer, or of the model that the server reports."""
    path = options.tokenizer
    if path is None:
        try:
            info = client.json("GET", "/model_info")
        except failures.CallFailed:
            info = {}
        path = info.get("tokenizer_path") or info.get("model_path") or options.model or model
    try:
        return Tokenizer(path)
    except errors.ConfigError as error:
        raise errors.ConfigError(
            f"{error}; give --tokenizer PATH, or use --dataset-name random-ids "
            "--tokenize-prompt --vocab-size N, which needs none"
        ) from error


def warm_up(
    client: transport.Client,
    request: backends.Options,
    prompt: prompts.Prompt,
    options: argparse.Namespace,
) -> None:
    """Sends the first prompt a few times with a short output, then may flush the prefix cache."""
    count = options.warmup_requests
    if count:
        short = prompts.Prompt(
            content=prompt.content,
            prompt_len=prompt.prompt_len,
            output_len=min(prompt.output_len, WARMUP_TOKENS),
        )
        records, _ = traffic.send(
            lambda one: backends.send(client, one, request),
            [short] * count,
            at_s=[0.0] * count,
            max_concurrency=options.max_concurrency,
            show_progress=False,
        )
        if all(record.error is not None for record in records):
            raise command_line.BenchError(f"the warm-up failed: {records[0].error}")
    if options.flush_cache:
        try:
            client.text("POST", f"/flush_cache?timeout={options.flush_cache_timeout}")
        except failures.CallFailed as error:
            raise command_line.BenchError(f"--flush-cache failed: {error}") from error


def print_result(result: dict[str, Any], options: argparse.Namespace) -> None:
    shown = result | {"max_concurrency": result["max_concurrency"] or "not set"}
    head: tuple[tables.Row, ...] = (
        ("Backend:", "backend"),
        ("Traffic request rate:", "request_rate"),
        ("Max request concurrency:", "max_concurrency"),
        ("Successful requests:", "completed"),
        *((("Failed requests:", "failed"),) if result["failed"] else ()),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Total generated tokens (retokenized):", "total_output_tokens_retokenized"),
        *tables.THROUGHPUTS,
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_throughput"),
        ("Concurrency:", "concurrency"),
    )
    lines = ["", tables.title(" Serving Benchmark Result "), *tables.rows(shown, head)]
    lines += tables.sections(shown, [("Denoising", tables.DENOISING), *tables.LATENCIES])
    if options.cache_report:
        lines += tables.sections(
            shown,
            [
                (
                    "Cache Hit Details",
                    (
                        ("Total prompt tokens:", "total_input_tokens"),
                        ("Total cached tokens:", "total_cached_tokens"),
                        ("Cache hit rate (%):", "cache_hit_rate_pct"),
                    ),
                )
            ],
        )
    tables.say("\n".join([*lines, tables.title("")]))


def details(records: Sequence[stats.Record]) -> dict[str, Any]:
    """Returns one list per figure, in the order of the requests; times are seconds."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.completion_tokens for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.intervals("tokens") for record in records],
        "e2e_latencies": [record.latency_s for record in records],
        "start_times": [record.start_s for record in records],
        "nfes": [record.nfe for record in records],
        "blocks": [record.blocks for record in records],
        "cached_tokens": [record.cached_tokens for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def _retokenized(records: Sequence[stats.Record], tokenizer: Any) -> dict[str, int | None]:
    """Counts the tokens of the answers' texts; None unless a tokenizer is loaded already."""
    if not tokenizer.cache_info().currsize:
        return {"total_output_tokens_retokenized": None}
    encode = tokenizer().encode
    texts = [record.text for record in records if record.error is None]
    count = sum(len(encode(text, add_special_tokens=False)) for text in texts)
    return {"total_output_tokens_retokenized": count}


def _cache(records: Sequence[stats.Record]) -> dict[str, Any]:
    done = [r for r in records if r.error is None and r.cached_tokens is not None]
    cached, prompt = sum(r.cached_tokens or 0 for r in done), sum(r.prompt_tokens for r in done)
    return {
        "total_cached_tokens": cached if done else None,
        "cache_hit_rate_pct": 100.0 * cached / prompt if prompt else None,
    }


if __name__ == "__main__":
    sys.exit(main())
