"""The command line of `jdllm.bench.images`, and the part of it that a result records."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

from jdllm import errors
from jdllm.bench import command_line, server_flags
from jdllm.bench.images import load as image_load
from jdllm.bench.images.load import Load
from jdllm.foreign import flags
from jdllm.options import config
from jdllm.server import cli

DESCRIPTION = """Load on an image model: on a running server over HTTP (--base-url, or --host and
--port), or on an engine in this process (--model-path). Flags are those of SGLang's image
benchmark; --compare and --loads are ours."""
TASKS = ("text-to-image", "t2i")  # SGLang's newer and older name of the same
PORT = 30000
_VIDEO = "only images of texts are measured"
REFUSED = {
    "num-frames": _VIDEO,
    "fps": _VIDEO,
    "image-path": _VIDEO,
    "enable-negative-prompt": 'use --extra-body \'{"negative_prompt": "..."}\'',
    "skip-warmup": "use --warmup-requests 0",
    "batch-size": "requests share steps by themselves; use --max-concurrency",
}
# Options of the engine that concern only models that write text, or a server with several clients.
WITHOUT = frozenset(
    [*config.TEXT_OPTIONS, "model", "seed", "served_model_name", "max_queued_requests",
     "enable_priority_scheduling", "schedule_low_priority_values_first"]
)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags of a command line; a flag that is not supported is refused by name."""
    words = sys.argv[1:] if argv is None else list(argv)
    for word in words:
        reason = REFUSED.get(word.partition("=")[0].removeprefix("--"))
        if word.startswith("--") and reason is not None:
            raise errors.ConfigError(f"{word.partition('=')[0]} is not supported: {reason}")
    parser = command_line.make_parser("images", DESCRIPTION)
    _add_target_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("requests"))
    _add_traffic_flags(parser.add_argument_group("traffic"))
    _add_output_flags(parser.add_argument_group("output"))
    cli.add_options(
        parser.add_argument_group("in process, as for jdllm serve (but log_level: warning)"),
        config.EngineConfig,
        without=WITHOUT,
    )
    flags.add(parser, without=command_line.OWN_FLAGS)
    return command_line.parse(parser, words)


def check(options: argparse.Namespace) -> None:
    """Refuses options that contradict one another."""
    engine_options = [name for name in engine_values(options) if name != "log_level"]
    if is_in_process(options):
        for name in ("base_url", "model", "api_key", "header"):
            if getattr(options, name):
                raise errors.ConfigError(
                    f"--{name.replace('_', '-')} is for a server, --model-path for an engine in "
                    "this process; give one"
                )
    elif engine_options:
        flag = flags.spelled(engine_options[0])
        raise errors.ConfigError(
            f"{flag} is for an engine in this process (--model-path); give it to the server"
        )
    urls = options.base_url or []
    if not is_in_process(options) and options.compare != (len(urls) == 2):
        raise errors.ConfigError(
            "--compare needs two servers, --base-url WITH_BATCHING WITHOUT (started with "
            "--batching-max-size 1), or --model-path"
            if options.compare
            else "--base-url takes two servers only with --compare"
        )
    if is_in_process(options) and options.compare and engine_values(options).get(
        "batching_max_size"
    ) == 1:  # fmt: skip
        raise errors.ConfigError("--compare with --batching-max-size 1 compares nothing")
    if options.loads and math.isfinite(options.request_rate):
        raise errors.ConfigError("--loads chooses the rates; leave --request-rate out")
    if not options.slo and options.slo_scale is not None:
        raise errors.ConfigError("--slo-scale needs --slo")


def load(options: argparse.Namespace) -> Load:
    """Returns the requests that the flags ask for."""
    return Load(
        dataset=options.dataset,
        path=options.dataset_path or None,
        num_prompts=options.num_prompts,
        count=options.num_outputs_per_prompt,
        width=options.width,
        height=options.height,
        num_inference_steps=options.num_inference_steps,
        profiles=image_load.parse_profiles(options.random_request_config),
        profile_seed=options.random_request_seed,
        extra=command_line.json_object(options.extra_body, "--extra-body"),
        seed=options.seed,
    )


def is_in_process(options: argparse.Namespace) -> bool:
    return "model_path" in vars(options)


def engine_values(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the engine that the command line gives."""
    known = config.EngineConfig.__dataclass_fields__
    return {name: value for name, value in vars(options).items() if name in known}


def base_urls(options: argparse.Namespace) -> list[str]:
    """Returns --base-url, or the URL that --host and --port give."""
    return options.base_url or [server_flags.address(options, PORT)]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what identifies the load and the program."""
    return {
        "dataset": options.dataset,
        "task": options.task,
        "num_prompts": options.num_prompts,
        "num_outputs_per_prompt": options.num_outputs_per_prompt,
        "width": options.width,
        "height": options.height,
        "num_inference_steps": options.num_inference_steps,
        "random_request_config": options.random_request_config,
        "seed": options.seed,
        "slo_scale": (options.slo_scale or 3.0) if options.slo else None,
        **command_line.provenance(),
    }


def _add_target_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=("jdllm", "sglang-image"),
        default="jdllm",
        help="both use POST /v1/images/generations",
    )
    group.add_argument(
        "--base-url",
        nargs="+",
        metavar="URL",
        help="server, or two of them with --compare (default: of --host, --port)",
    )
    server_flags.add(group, port=PORT, default_port=str(PORT))


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset",
        choices=image_load.DATASETS,
        default="random",
        help="random: bundled captions, one to eight of them a prompt; vbench: prompts of "
        "--dataset-path (default: random, as nothing is downloaded)",
    )
    group.add_argument("--dataset-path", default="", metavar="FILE", help="holds the prompts")
    group.add_argument("--task", choices=TASKS, default=TASKS[0], help="what is measured")
    for name in ("width", "height"):
        group.add_argument(
            f"--{name}", type=command_line.positive, metavar="N", help="pixels (default: the "
            "model's)",
        )  # fmt: skip
    group.add_argument(
        "--num-inference-steps",
        type=command_line.positive,
        metavar="N",
        help="denoising steps of each image (default: the model's)",
    )
    group.add_argument(
        "--num-prompts", type=command_line.positive, default=10, metavar="N", help="requests"
    )
    group.add_argument(
        "--num-outputs-per-prompt",
        type=command_line.positive,
        default=1,
        metavar="N",
        help="images of each request",
    )
    group.add_argument(
        "--random-request-config",
        metavar="JSON",
        help="mixed load: a list of objects with width, height, num_inference_steps, weight, "
        "slo_ms or other fields of the body; each request draws one",
    )
    group.add_argument(
        "--random-request-seed", type=command_line.natural, default=42, help="of these draws"
    )
    group.add_argument("--extra-body", metavar="JSON", help="merged into every body, key by key")
    group.add_argument(
        "--seed", type=command_line.natural, default=42, help="of prompts, images and arrivals"
    )


def _add_traffic_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-concurrency",
        type=command_line.positive,
        default=1,
        metavar="N",
        help="most requests at a time; with --request-rate give a high one, or requests wait here",
    )
    group.add_argument(
        "--request-rate",
        type=command_line.rate,
        default=math.inf,
        help="requests per second, Poisson; inf sends all at once",
    )
    group.add_argument(
        "--warmup-requests",
        type=command_line.natural,
        default=1,
        metavar="N",
        help="requests at once of each size and kind before the measured ones, three times: with "
        "short, middle and long prompts",
    )
    group.add_argument(
        *("--warmup-inference-steps", "--warmup-num-inference-steps"),
        dest="warmup_inference_steps",
        type=command_line.positive,
        default=1,
        metavar="N",
        help="their denoising steps",
    )
    group.add_argument(
        "--slo",
        action="store_true",
        help="an answer may take --slo-scale times what a request of its kind takes alone, which "
        "is measured first",
    )
    group.add_argument(
        "--slo-scale", type=command_line.factor, metavar="X", help="that factor (default: 3)"
    )
    group.add_argument(
        "--compare",
        action="store_true",
        help="the same load with batching and without (batching_max_size 1): one table, one plot",
    )
    group.add_argument(
        "--loads",
        type=shares,
        default=[],
        metavar="A,B,C",
        help="after the load, Poisson arrivals at these shares of the throughput that it had "
        "(of the first server), without a limit of requests at a time",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-file", metavar="JSONL", help="a line for each run is appended")
    group.add_argument(
        "--plot-file",
        metavar="NAME",
        help="--compare writes NAME.png and NAME.svg; '' for no plot (default: images-compare)",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def shares(text: str) -> list[float]:
    """Returns the numbers of a list A,B,C, for argparse."""
    found = [float(part) for part in text.split(",") if part.strip()]
    if not found or not all(0 < one < 10 for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of shares such as 0.5,0.8,0.95")
    return found
