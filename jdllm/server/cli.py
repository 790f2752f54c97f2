"""The command line of `jdllm serve`, derived from the config dataclasses.

A flag is the name of a field, with dashes. A value comes from the default, from `--config
FILE.yaml` or from the command line (the later one wins), and the options remember its source.
Flags of SGLang and vLLM that are no fields are in `jdllm/foreign/flags.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection, Sequence
from typing import Any

import pydantic

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.checkpoint import source
from jdllm.foreign import flags as foreign_flags
from jdllm.host import arguments
from jdllm.options import config
from jdllm.options import hints as option_hints

ALIASES = foreign_flags.ALIASES | {"drain_timeout": "drain_timeout_s"}
SECRETS = ("api_key", "admin_api_key")
DESCRIPTION = """Serves a diffusion language model over HTTP.

Flags are SGLang's, and vLLM's names are known. Flags of either that only concern speed are
accepted, and the log says what happens instead; docs/flags.md lists them."""
# Whose value, true or false, SGLang's command lines may give.
SWITCHES_WITH_VALUES = frozenset({"escape_special_tokens", "text_encoder_cpu_offload"})
CONFIG = "options by flag name; flags win (default: none)"

HELP = {
    "model_path": "checkpoint folder, hub id, or a bundled model: "
    f"{', '.join((*source.BUNDLED_MODELS, *source.BUNDLED_IMAGE_MODELS))} "
    f"(default: {source.BUNDLED_MODEL})",
    "tokenizer_path": "tokenizer folder, if not the checkpoint's",
    "served_model_name": "name in /v1/models and in answers",
    "revision": "hub revision (branch, tag or commit)",
    "download_dir": "where hub downloads go",
    "load_format": "how weights are stored; dummy makes random ones",
    "trust_remote_code": "accepted for compatibility; no remote code is ever run",
    "skip_tokenizer_init": "no tokenizer: only /generate with input_ids",
    "chat_template": "Jinja template or a file that holds one",
    "escape_special_tokens": "special tokens in the messages of users, systems and tools are plain "
    "text, so that nobody forges a turn; a request may say otherwise",
    "dtype": "dtype of weights and KV",
    "context_length": "most tokens of prompt and output together",
    "mem_fraction_static": "share of device memory for weights and KV, and for images also for "
    "what launches need (GPU)",
    "max_total_tokens": "tokens the KV pool holds",
    "page_size": "tokens per KV page",
    "max_running_requests": "most requests that decode at the same time",
    "max_queued_requests": "requests that may wait; more are answered 503",
    "chunked_prefill_size": "most tokens of one prefill launch, or of one forward of whole "
    "canvases",
    "max_prefill_tokens": "prompt tokens, padding included, that prefill launches may process "
    "before the next decode launch; the launch that reaches this number is the last (default: four "
    "times chunked_prefill_size)",
    "num_continuous_decode_steps": "most denoising steps per decode launch; more steps mean less "
    "work for the host, fewer steps mean that blocks are sent and requests begin sooner",
    "disable_fused_commit": "write the K,V of a finished block in a forward of its own",
    "disable_draft_adapter": "draft without the adapter that lies beside the model's weights",
    "disable_overlap_schedule": "read the results of a launch before the next one is planned",
    "schedule_policy": "order of the queue: by arrival, or the longest cached prefix first; "
    "requests take turns under both, so that a list of prompts does not hold up others",
    "enable_priority_scheduling": "requests may carry a priority; the highest is admitted first, "
    "none comes last, and a low one waits for as long as higher ones do",
    "schedule_low_priority_values_first": "with --enable-priority-scheduling: the lowest first",
    "disable_radix_cache": "do not share the K,V of common prompt prefixes",
    "dllm_algorithm": "decoding algorithm, or several separated by commas; the first is the "
    "default: "
    f"{', '.join(lookup.TABLE)}",
    "dllm_algorithm_config": "YAML file with options of the algorithm",
    "random_seed": "seed for requests that give none",
    "log_level": "debug, info, warning, error or critical",
    "decode_log_interval": "launches between two statistics lines",
    "tp_size": "GPUs of this host over which the model is split",
    "ep_size": "over how many GPUs whole experts are spread: tp-size (the default for models with "
    "experts), or 1 to slice every expert",
    "disable_custom_all_reduce": "with tp-size: sum over GPUs with XLA's collectives, not in "
    "the GPUs' memory; a loop of steps is then no CUDA graph",
    "batching_mode": "image models: how requests share launches; images of one size share steps, "
    "and a new request joins at the next step",
    "batching_max_size": "image models: most requests in a launch; 1 switches batching off "
    "(default: the largest compiled number)",
    "batching_delay_ms": "image models: how long the first step may wait for other requests while "
    "nothing runs; running images never wait",
    "batching_config": "image models: JSON file with rules that bound the requests of a launch by "
    "size and memory",
    "enable_batching_metrics": "image models: a line of the log about every 5 steps",
    "warmup_resolutions": "image models: sizes that are compiled at start, such as 1024x1024 "
    "512x512; others are at their first use (default: the size of images without a size)",
    "max_image_pixels": "image models: most pixels of an image (default: 2048 times 2048)",
    "enable_step_cache": "image models: requests may leave out most of a step that changes little "
    "(residual_diff_threshold); takes device memory for every image that runs",
    "text_encoder_cpu_offload": "image models: the weights of text encoders wait in the host's "
    "memory, and each layer is copied to the device when a new caption is encoded",
    "quantization": "image models: fp8 keeps the large weights of the transformer in 8-bit floats, "
    "which are made while the checkpoint loads (default: none)",
    "variant": "image models: weights to read where a component has several, such as fp16 "
    "(default: those without a variant)",
    "host": "address to listen on",
    "port": "port to listen on; 0 chooses a free one",
    "replicas": "engines behind this server, each a process with GPUs of its own, by Ray Serve "
    "(pip install 'jdllm[ray]'); 1 needs no Ray",
    "api_key": "bearer key for all routes but /health and its like and /metrics; every user of the "
    "machine can see it (ps), so prefer the file",
    "admin_api_key": "bearer key for /flush_cache, /start_profile, /stop_profile and abort_all",
    "api_key_file": "file with the API keys, one per line",
    "admin_api_key_file": "file with the keys of the administrator, one per line",
    "metrics_require_api_key": "answer /metrics only to requests with a key",
    "enable_metrics": "serve /metrics",
    "log_level_http": "level of the access log; info logs every request",
    "max_body_bytes": "largest request body",
    "max_choices_per_request": "most choices of one request: prompts times n (each has at most "
    "context_length tokens); also the longest list that /tokenize takes",
    "drain_timeout_s": "seconds that running requests have to end after SIGTERM",
    "skip_server_warmup": "no warm-up generation before the server is ready",
    "strict_model_name": "answer 404 to requests that name another model",
    "cors_allow_origins": "origins whose web pages may read and generate, separated by commas; * "
    "is any, '' none; admin routes are closed to the pages of other origins in any case",
    "timeout_keep_alive": "seconds until an idle connection is closed",
    "timeout_read_request": "seconds in which the head of a request must arrive, and then its body",
    "profile_dir": "folder that /start_profile may write to (default: the system's folder for "
    "temporary files)",
    "disable_playground": "no page for browsers at /",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The resolved configuration, and where each value comes from.

    `notes` say what happens instead of flags that are accepted without effect.
    """

    engine: config.EngineConfig
    server: config.ServerConfig
    sources: dict[str, str]
    notes: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """Returns one line per option; API keys are masked."""
        lines = []
        for owner in (self.engine, self.server):
            for field in dataclasses.fields(owner):
                value = getattr(owner, field.name)
                masked = field.name in SECRETS and value is not None
                shown = "***" if masked else repr(value)
                lines.append(f"{field.name}={shown} ({self.sources[field.name]})")
        return lines


def parse(argv: Sequence[str]) -> Options:
    """Returns the options of a command line.

    Raises `ConfigError` for wrong values and refused flags. argparse itself ends the process
    for unknown flags (exit code 2) and after --help.
    """
    refuse_flags(argv)
    flags = _parse_flags(argv)
    notes = foreign_flags.take(flags)
    path = flags.pop("config", None)
    from_file = {} if path is None else read_config(path, notes)
    values = from_file | flags
    sources = {name: "default" for name in _fields()}
    sources |= {name: "file" for name in from_file} | {name: "flag" for name in flags}
    return Options(
        engine=config.EngineConfig(**_own(config.EngineConfig, values)),
        server=config.ServerConfig(**_own(config.ServerConfig, values)),
        sources=sources,
        notes=tuple(notes),
    )


def _parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Returns the flags by option name; a lone word is the model, as in `vllm serve MODEL`."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if len(rest) > 1 or any(word.startswith("-") for word in rest):
        parser.refuse(rest, option_hints.places("{} in the file of --dllm-algorithm-config"))
    flags = vars(options)
    if rest and flags.setdefault("model_path", rest[0]) != rest[0]:
        parser.error(f"the model is both {rest[0]!r} and --model-path {flags['model_path']!r}")
    return flags


def _own(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that are fields of the dataclass `cls`."""
    return {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}


def read_config(path: str, notes: list[str]) -> dict[str, Any]:
    """Returns the options in a YAML file, whose keys are flag names (dashes or underscores).

    Appends to `notes` what happens instead of keys that are accepted without effect.
    """
    values: dict[str, Any] = {}
    fields = _fields()
    for key, value in config.read_yaml(path).items():
        name = _canonical(str(key))
        if name in foreign_flags.OPPOSITES and isinstance(value, bool):
            name, value = foreign_flags.OPPOSITES[name], not value
        note = None if name in fields else foreign_flags.note(name, value)
        if note is not None:
            notes.append(note)
            continue
        if name not in fields:
            hint = option_hints.of_start(name, {*fields, *ALIASES})
            raise errors.ConfigError(f"unknown option {key!r} in {path}{hint}")
        if name in values:
            raise errors.ConfigError(f"{key} in {path} repeats option {name}")
        values[name] = _checked(name, value, fields[name], path)
    return values


def refuse_flags(argv: Sequence[str]) -> None:
    """Raises a `ConfigError` if a flag of SGLang or vLLM asks for what does not exist here."""
    for argument in argv:
        if not argument.startswith("--"):
            continue
        flag = argument.partition("=")[0]
        name = _canonical(flag[2:])
        reason = None if name in _fields() else foreign_flags.refusal(name)
        if reason is not None:
            raise errors.ConfigError(f"{flag} is not supported: {reason}")


def _parser() -> arguments.Parser:
    parser = arguments.Parser(
        "jdllm serve", DESCRIPTION, usage="%(prog)s [MODEL] [OPTIONS]   (or --model-path MODEL)"
    )
    parser.add_argument("--config", metavar="FILE.yaml", default=argparse.SUPPRESS, help=CONFIG)
    for cls in (config.EngineConfig, config.ServerConfig):
        group = parser.add_argument_group((cls.__doc__ or "").partition("\n")[0].rstrip("."))
        add_options(group, cls)
    foreign_flags.add(parser)
    return parser


def add_options(
    group: argparse._ArgumentGroup,
    cls: type,
    *,
    only: Collection[str] = (),
    without: Collection[str] = (),
) -> None:
    """Adds a flag, its aliases and its help for each field of a config dataclass.

    `only` are the fields that get a flag (all, if it is empty), `without` are fields and aliases
    that get none. A flag that is not given leaves no attribute, so that the
    dataclass has the defaults.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = field.name
        if (only and name not in only) or name in without:
            continue
        aliases = [alias for alias, of in ALIASES.items() if of == name and alias not in without]
        how = config.argparse_options(hints[name])
        if "type" in how:
            how["metavar"] = {int: "N", float: "X"}.get(how["type"], name.split("_")[-1].upper())
        if name == "served_model_name":
            how |= {"action": arguments.OneName, "nargs": "+"}
        if name == "warmup_resolutions":
            how |= {"action": Joined, "nargs": "+"}
        if name in SWITCHES_WITH_VALUES:
            how = {"nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
        if name in foreign_flags.VALUES:
            how["type"] = lambda text, known=foreign_flags.VALUES[name]: known.get(text, text)
        group.add_argument(
            *map(foreign_flags.spelled, (name, *aliases)),
            dest=name,
            default=argparse.SUPPRESS,
            help=_help(field),
            **how,
        )
        for other in (other for other, of in foreign_flags.OPPOSITES.items() if of == name):
            hidden: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
            hidden["help"] = argparse.SUPPRESS
            group.add_argument(foreign_flags.spelled(other), action="store_false", **hidden)
            group.add_argument(foreign_flags.spelled(f"no_{other}"), action="store_true", **hidden)


def _boolean(text: str) -> bool:
    if text not in foreign_flags.BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


class Joined(argparse.Action):
    """Joins the words of a flag by commas, which some of them may have already."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        del parser, option_string
        setattr(namespace, self.dest, ",".join(word.rstrip(",") for word in values))


def _help(field: dataclasses.Field[Any]) -> str:
    text = HELP[field.name]
    if "(default" in text:
        return text
    is_engines = field.default is None and field.name in _ENGINE_FIELDS
    default = "chosen at start" if is_engines else arguments.shown_default(field.default)
    return f"{text} (default: {default})"


def _checked(name: str, value: Any, hint: Any, path: str) -> Any:
    """Returns a YAML value, checked against the field's type; only int becomes float."""
    try:
        return pydantic.TypeAdapter(hint).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        message = error.errors()[0]["msg"]
        raise errors.ConfigError(f"{name}={value!r} in {path}: {message}") from error


_ENGINE_FIELDS = frozenset(typing.get_type_hints(config.EngineConfig))


def _fields() -> dict[str, Any]:
    return {
        **typing.get_type_hints(config.EngineConfig),
        **typing.get_type_hints(config.ServerConfig),
    }


def _canonical(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)
