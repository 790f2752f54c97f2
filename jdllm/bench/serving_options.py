"""The command line of `jdllm.bench.serving`, and the part of it that a result records."""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Sequence
from typing import Any

from jdllm import errors
from jdllm.bench import backends, command_line, server_flags
from jdllm.options import sampling_params

DESCRIPTION = "Load on a running server, over HTTP, with SGLang's flags and figures."


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags of a command line; a flag that is not supported is refused by name."""
    parser = command_line.make_parser("serving", DESCRIPTION)
    _add_server_flags(parser.add_argument_group("server"))
    command_line.add_dataset_flags(parser)
    _add_prompt_flags(parser.add_argument_group("prompts"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_decoding_flags(parser.add_argument_group("decoding"))
    _add_output_flags(parser.add_argument_group("output"))
    return command_line.parse(parser, argv)


def check(options: argparse.Namespace) -> None:
    """Refuses options that contradict one another or the engine's own rules."""
    kind, _ = backends.BACKENDS[options.backend]
    if kind == "chat" and (options.tokenize_prompt or options.apply_chat_template):
        flag = "--tokenize-prompt" if options.tokenize_prompt else "--apply-chat-template"
        raise errors.ConfigError(
            f"{flag} does not go with --backend {options.backend}: the server applies its template "
            "to messages"
        )
    if options.vocab_size is not None and not (
        options.dataset_name == "random-ids" and options.tokenize_prompt
    ):
        raise errors.ConfigError("--vocab-size is for --dataset-name random-ids --tokenize-prompt")
    extra = command_line.json_object(options.extra_request_body, "--extra-request-body")
    sampling = extra.get("sampling_params")
    count = extra.get("n", sampling.get("n") if isinstance(sampling, dict) else None)
    if count not in (None, 1):
        raise errors.ConfigError(f"--extra-request-body asks for n={count}; only 1 is measured")
    if options.flush_cache and options.backend.startswith("vllm"):
        raise errors.ConfigError(f"--flush-cache does not go with --backend {options.backend}")
    sampling_params.SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        dllm=sampling_params.DllmParams.from_mapping(command_line.dllm_options(options.dllm)),
    )


def request(options: argparse.Namespace, model: str) -> backends.Options:
    """Returns what all requests of the run have in common."""
    kind, _ = backends.BACKENDS[options.backend]
    return backends.Options(
        kind=kind,
        model=model,
        temperature=options.temperature,
        top_p=options.top_p,
        ignore_eos=not options.disable_ignore_eos,
        stream=not options.disable_stream,
        dllm=command_line.dllm_options(options.dllm),
        extra=command_line.json_object(options.extra_request_body, "--extra-request-body"),
    )


def settings(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Returns what identifies the run: SGLang's keys, then ours."""
    finite = math.isfinite(options.request_rate)
    return {
        "tag": options.tag,
        "backend": options.backend,
        "dataset_name": options.dataset_name,
        "request_rate": options.request_rate if finite else "inf",  # JSON has no infinity
        "max_concurrency": options.max_concurrency,
        "sharegpt_output_len": options.sharegpt_output_len,
        "random_input_len": options.random_input_len,
        "random_output_len": options.random_output_len,
        "random_range_ratio": options.random_range_ratio,
        "num_prompts": options.num_prompts,
        "seed": options.seed,
        "ignore_eos": not options.disable_ignore_eos,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "dllm": command_line.dllm_options(options.dllm),
        "extra_request_body": options.extra_request_body,
        "base_url": base_url(options),
        "model": model,
        **command_line.provenance(),
    }


def default_file(options: argparse.Namespace) -> str:
    """Returns SGLang's name of the result file."""
    today = datetime.datetime.now().strftime("%m%d")
    head = f"{options.backend}_{today}_{options.num_prompts}"
    if options.dataset_name.startswith("random"):
        return f"{head}_{options.random_input_len}_{options.random_output_len}.jsonl"
    return f"{head}_{options.dataset_name}.jsonl"


def base_url(options: argparse.Namespace) -> str:
    """Returns --base-url, or the URL that --host and --port give."""
    if options.base_url is not None:
        return options.base_url
    _, port = backends.BACKENDS[options.backend]
    return server_flags.address(options, port)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=backends.BACKENDS,
        default="jdllm",
        help="what answers, and on which route",
    )
    group.add_argument("--base-url", metavar="URL", help="server (default: of --host, --port)")
    server_flags.add(group, port=None, default_port="by --backend")
    group.add_argument("--served-model-name", help="name to send (default: --model)")
    group.add_argument(
        "--tokenizer", metavar="PATH", help="counts tokens (default: the server's model)"
    )


def _add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenize-prompt", action="store_true", help="send token ids, not text")
    group.add_argument(
        "--vocab-size", type=command_line.positive, help="for random-ids without a tokenizer"
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=command_line.rate,
        default=math.inf,
        help="requests per second, Poisson; inf sends all at once",
    )
    group.add_argument(
        "--max-concurrency",
        type=command_line.positive,
        metavar="N",
        help="most requests at a time (default: no limit)",
    )
    group.add_argument(
        "--warmup-requests",
        type=command_line.natural,
        default=1,
        metavar="N",
        help="short requests before the measured ones",
    )
    group.add_argument(
        "--flush-cache", action="store_true", help="empty the prefix cache after the warm-up"
    )
    group.add_argument(
        "--flush-cache-timeout",
        type=command_line.seconds,
        default=60.0,
        help="seconds that a flush waits for running requests",
    )


def _add_decoding_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--disable-ignore-eos", action="store_true", help="answers may end early")
    group.add_argument("--disable-stream", action="store_true", help="whole answers at once")
    group.add_argument("--temperature", type=float, default=0.0, help="of every request")
    group.add_argument("--top-p", type=float, default=1.0, help="of every request")
    command_line.add_dllm_flag(group)
    group.add_argument(
        "--extra-request-body", metavar="JSON", help="merged into every body, key by key"
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-file",
        metavar="JSONL",
        help="one line is appended (default: named after backend, date and load)",
    )
    group.add_argument("--output-details", action="store_true", help="every request, too")
    group.add_argument("--cache-report", action="store_true", help="show prefix cache hits")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--tag", help="put into the result")
