"""What the three command lines share: flags, refusals by name, exit codes.

Flags are SGLang's. If SGLang has a flag whose feature does not exist here, the error says what
replaces it; argparse refuses unknown flags. No flag is ignored.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import shlex
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from jdllm import errors, version
from jdllm.bench import prompts
from jdllm.foreign import flags
from jdllm.host import arguments
from jdllm.options import config
from jdllm.server import cli

SECRETS = ("--api-key",)

_PROFILER = "profile the process from outside, for example with nsys"
_LOGPROB = "this benchmark asks for no log-probabilities"
_DATASET = f"datasets are {', '.join(prompts.DATASETS)}"
# Prefix of a flag -> what to do instead.
REFUSED: dict[str, str] = {
    "profile": _PROFILER,
    "return-logprob": _LOGPROB,
    "top-logprobs-num": _LOGPROB,
    "token-ids-logprob": _LOGPROB,
    "logprob-start-len": _LOGPROB,
    "return-routed-experts": "routing is not returned",
    "lora": "LoRA is not supported",
    "gsp-": _DATASET,
    "image": _DATASET,
    "random-image": _DATASET,
    "mooncake": _DATASET,
    "use-trace-timestamps": _DATASET,
    "agentic": _DATASET,
    "speed-bench": _DATASET,
    "dataset-offset": _DATASET,
    "pd-separated": "prefill and decode are not separated",
    "fake-prefill": "prefill and decode are not separated",
    "plot-throughput": "plot the file of --output-file --output-details",
    "print-requests": "use --output-details",
    "goodput": "compute it from --output-file --output-details",
    "do-not-exit": "the command ends when it is done",
    "correctness-test": "use jdllm eval",
    "correct": "use jdllm eval",
    "cut-len": "use jdllm eval",
    "log-decode-step": "use --result-filename; it holds the latency of a forward",
}

# Flags of benchmarks that mean something else to a server.
OWN_FLAGS = ("backend",)
# Options of the engine that concern only a server with several clients, or images.
WITHOUT_EFFECT = (
    *sorted(config.IMAGE_OPTIONS),
    "served_model_name",
    "max_queued_requests",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
)


class BenchError(RuntimeError):
    """Says that nothing can be measured: server gone, wrong model, every request failed."""


def finish(name: str, work: Callable[[], object]) -> int:
    """Runs `work`; returns 0, 1 when it could not measure, 2 for a wrong option, 130 for Ctrl-C."""
    try:
        work()
    except (errors.ConfigError, errors.RequestError) as error:
        return _fail(name, error, 2)
    except BenchError as error:
        return _fail(name, error, 1)
    except KeyboardInterrupt:
        return _fail(name, "interrupted; nothing is written", 130)
    return 0


def _fail(name: str, error: object, code: int) -> int:
    arguments.report(_prog(name), error)
    return code


def make_parser(name: str, description: str | None) -> arguments.Parser:
    """Returns the parser of `jdllm bench NAME`."""
    return arguments.Parser(_prog(name), description)


def _prog(name: str) -> str:
    return f"jdllm bench {name.replace('_', '-')}"


def parse(parser: arguments.Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line; a flag that is known but not supported is a ConfigError."""
    argv = sys.argv[1:] if argv is None else argv
    for argument in argv:
        flag = argument.partition("=")[0]
        if not flag.startswith("--"):
            continue
        reason = next((why for it, why in REFUSED.items() if flag[2:].startswith(it)), None)
        if reason is not None:
            raise errors.ConfigError(f"{flag} is not supported: {reason}")
    cli.refuse_flags(argv)
    options = parser.parse(argv)
    for note in flags.take(vars(options), without=OWN_FLAGS):
        sys.stderr.write(f"{note}\n")
    return options


def shown(argv: Sequence[str]) -> str:
    """Returns a command line in the form that results record; API keys are masked."""
    words, is_secret = [], False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if is_secret or (flag.lower() == "authorization" and equals):
            words.append("***")
        elif flag in SECRETS and equals:
            words.append(f"{flag}=***")
        else:
            words.append(word)
        is_secret = word in SECRETS
    return shlex.join(words)


def provenance() -> dict[str, Any]:
    """Returns what a result over HTTP records of this process: command, date, versions."""
    return {
        "command": shown(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "jdllm": version.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Adds SGLang's flags for the prompts."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name",
        choices=prompts.DATASETS,
        default="random",
        help="random: text cut to length (of --dataset-path, else bundled word problems); "
        "random-ids: random tokens; custom, openai: JSON lines; sharegpt: a local JSON file "
        "(default: random, as nothing is downloaded)",
    )
    group.add_argument("--dataset-path", default="", metavar="FILE", help="holds the prompts")
    group.add_argument(
        *("--num-prompts", "--num-prompt"), type=positive, default=1000, metavar="N", help="prompts"
    )
    for name in ("input", "output"):
        spellings = (f"--random-{name}-len", f"--random-{name}")
        group.add_argument(
            *spellings, type=positive, default=1024, metavar="TOKENS", help=f"longest {name}"
        )
    group.add_argument(
        "--random-range-ratio",
        type=share,
        default=0.0,
        metavar="R",
        help="lengths are drawn from [R * len, len]; 1 makes them all equal",
    )
    group.add_argument(
        "--sharegpt-output-len",
        type=positive,
        metavar="TOKENS",
        help="output length of every row of a file (default: the one that it gives)",
    )
    group.add_argument(
        "--sharegpt-context-len",
        type=positive,
        metavar="TOKENS",
        help="leave out rows of a file that are longer with their output",
    )
    group.add_argument("--apply-chat-template", action="store_true", help="to prompts of a file")
    group.add_argument("--prompt-suffix", default="", help="appended to prompts of a file")
    group.add_argument("--seed", type=natural, default=42, help="of prompts and arrivals")


def add_dllm_flag(group: argparse._ActionsContainer) -> None:
    """Adds the flag for denoising options; `dllm_options` reads it."""
    group.add_argument(
        "--dllm",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="denoising options of every request, such as threshold=0.9",
    )


def dataset(
    options: argparse.Namespace, *, as_ids: bool, vocab_size: int | None
) -> prompts.Dataset:
    """Returns the dataset that the flags of `add_dataset_flags` ask for."""
    return prompts.Dataset(
        name=options.dataset_name,
        path=options.dataset_path or None,
        num_prompts=options.num_prompts,
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        fixed_output_len=options.sharegpt_output_len,
        context_len=options.sharegpt_context_len,
        apply_chat_template=options.apply_chat_template,
        suffix=options.prompt_suffix,
        seed=options.seed,
        as_ids=as_ids,
        vocab_size=vocab_size,
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `EngineConfig` that can change a measurement, as `jdllm serve` has them."""
    cli.add_options(
        parser.add_argument_group("engine, as for jdllm serve (but log_level: warning)"),
        config.EngineConfig,
        without=("seed", *WITHOUT_EFFECT),
    )
    flags.add(parser, without=OWN_FLAGS)


def engine_config(options: argparse.Namespace, **chosen: Any) -> config.EngineConfig:
    """Returns the config that the flags of `add_engine_flags` ask for.

    `chosen` are the benchmark's own values for what the command line leaves open. The log shows
    warnings only, unless --log-level asks for more.
    """
    known = typing.get_type_hints(config.EngineConfig)
    given = {name: value for name, value in vars(options).items() if name in known}
    return config.EngineConfig(**{"log_level": "warning", **chosen, **given})


def dllm_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Returns the denoising options in a list of KEY=VALUE; each value is parsed as YAML."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals or not value:
            raise errors.ConfigError(f"--dllm {pair!r} is not KEY=VALUE")
        found[key] = config.parse_yaml(value, f"--dllm {pair}")
    return found


def json_object(text: str | None, flag: str) -> dict[str, Any]:
    """Returns the JSON object given to a flag, {} for None.

    Only what a body can carry: NaN and Infinity would arrive as null.
    """
    if not text:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise errors.ConfigError(f"{flag} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise errors.ConfigError(f"{flag} must be a JSON object, got {text!r}")
    return value


def merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the values of `extra`; objects in both are merged key by key."""
    result = dict(base)
    for key, value in extra.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def positive(text: str) -> int:
    """Returns a positive integer, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def natural(text: str) -> int:
    """Returns an integer of 0 or more, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def share(text: str) -> float:
    """Returns a number between 0 and 1, for argparse."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1")
    return value


def rate(text: str) -> float:
    """Returns a number above 0, `inf` included, for argparse."""
    value = float(text)
    if math.isnan(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def factor(text: str) -> float:
    """Returns a finite number above 0, for argparse."""
    value = rate(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value


def seconds(text: str) -> float:
    """Returns a finite number of 0 or more, for argparse."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
