"""The command line of `jdllm.serve`, derived from the config dataclasses.

A flag is the name of a field, with dashes. A value comes from the default, from `--config
FILE.yaml` or from the command line (the later one wins), and the options remember its source.
If SGLang has a flag whose feature does not exist here, the error says what replaces it.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import pydantic

from jdllm import algorithms, config, errors
from jdllm.checkpoint import source

ALIASES = config.ALIASES | {"drain_timeout": "drain_timeout_s"}
# Flags that are accepted and change nothing: the engine always does what they ask for.
NEUTRAL_FLAGS = {"dllm_fdfo": "rows never wait for one another (always so)"}
SECRETS = ("api_key", "admin_api_key")
REFUSED_PREFIXES = {"cuda_graph_": "every bucket is compiled at start; use --max-running-requests"}

HELP = {
    "model_path": "checkpoint folder, hub id, or a bundled model: "
    f"{' (default), '.join(source.BUNDLED_MODELS)}",
    "tokenizer_path": "tokenizer folder, if not the checkpoint's",
    "served_model_name": "name in /v1/models and in answers",
    "revision": "hub revision (branch, tag or commit)",
    "download_dir": "where hub downloads go",
    "load_format": "how weights are stored; dummy makes random ones",
    "trust_remote_code": "accepted for compatibility; no remote code is ever run",
    "skip_tokenizer_init": "no tokenizer: only /generate with input_ids",
    "chat_template": "Jinja template or a file that holds one",
    "dtype": "dtype of weights and KV",
    "context_length": "most tokens of prompt and output together",
    "mem_fraction_static": "share of device memory for weights and KV (GPU)",
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
    "disable_overlap_schedule": "read the results of a launch before the next one is planned",
    "schedule_policy": "order of the queue",
    "disable_radix_cache": "do not share the K,V of common prompt prefixes",
    "dllm_algorithm": "decoding algorithm, or several separated by commas; the first is the "
    "default: "
    f"{', '.join(algorithms.TABLE)}",
    "dllm_algorithm_config": "YAML file with options of the algorithm",
    "random_seed": "seed for requests that give none",
    "log_level": "debug, info, warning, error or critical",
    "decode_log_interval": "launches between two statistics lines",
    "tp_size": "GPUs per replica; only 1 so far",
    "host": "address to listen on",
    "port": "port to listen on; 0 chooses a free one",
    "api_key": "bearer key for all routes but health and metrics",
    "admin_api_key": "bearer key for /flush_cache and abort_all",
    "enable_metrics": "serve /metrics",
    "log_level_http": "level of the access log; info logs every request",
    "max_body_bytes": "largest request body",
    "max_choices_per_request": "most choices of one request: prompts times n (each has at most "
    "context_length tokens); also the longest list that /tokenize takes",
    "drain_timeout_s": "seconds that running requests have to end after SIGTERM",
    "skip_server_warmup": "no warm-up generation before the server is ready",
    "strict_model_name": "answer 404 to requests that name another model",
    "cors_allow_origins": "origins whose web pages may call, separated by commas; * is any, '' "
    "none",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The resolved configuration, and where each value comes from."""

    engine: config.EngineConfig
    server: config.ServerConfig
    sources: dict[str, str]

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
    _refuse_flags(argv)
    flags = vars(_parser().parse_args(argv))
    for name in NEUTRAL_FLAGS:
        flags.pop(name, None)
    path = flags.pop("config", None)
    from_file = {} if path is None else read_config(path)
    values = from_file | flags
    sources = {name: "default" for name in _fields()}
    sources |= {name: "file" for name in from_file} | {name: "flag" for name in flags}
    return Options(
        engine=config.EngineConfig(**_own(config.EngineConfig, values)),
        server=config.ServerConfig(**_own(config.ServerConfig, values)),
        sources=sources,
    )


def _own(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that are fields of the dataclass `cls`."""
    return {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}


def read_config(path: str) -> dict[str, Any]:
    """Returns the options in a YAML file, whose keys are flag names (dashes or underscores)."""
    values: dict[str, Any] = {}
    fields = _fields()
    for key, value in config.read_yaml(path).items():
        name = _canonical(str(key))
        reason = refusal(name)
        if reason is not None:
            raise errors.ConfigError(f"{key} in {path} is not supported: {reason}")
        if name in NEUTRAL_FLAGS:
            continue
        if name not in fields:
            hint = errors.nearest(name, {*fields, *ALIASES})
            raise errors.ConfigError(f"unknown option {key!r} in {path}{hint}")
        if name in values:
            raise errors.ConfigError(f"{key} in {path} repeats option {name}")
        values[name] = _checked(name, value, fields[name], path)
    return values


def refusal(name: str) -> str | None:
    """Returns what replaces a flag that this server refuses, None for any other flag."""
    for prefix, reason in REFUSED_PREFIXES.items():
        if name.startswith(prefix):
            return config.REFUSED_FLAGS.get(name, reason)
    return config.REFUSED_FLAGS.get(name)


def _refuse_flags(argv: Sequence[str]) -> None:
    for argument in argv:
        if not argument.startswith("--"):
            continue
        flag = argument.partition("=")[0]
        reason = refusal(_canonical(flag[2:]))
        if reason is not None:
            raise errors.ConfigError(f"{flag} is not supported: {reason}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jdllm.serve",
        description="Serves a diffusion language model over HTTP.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="options by flag name; flags win")
    spellings = {name: [alias for alias, of in ALIASES.items() if of == name] for name in _fields()}
    for cls in (config.EngineConfig, config.ServerConfig):
        group = parser.add_argument_group((cls.__doc__ or "").partition("\n")[0].rstrip("."))
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, hint in typing.get_type_hints(cls).items():
            flags = [_flag(spelling) for spelling in [name, *spellings[name]]]
            text = HELP[name]
            if defaults[name] is not None and not isinstance(defaults[name], bool):
                text += f" (default: {defaults[name]})"
            group.add_argument(*flags, dest=name, help=text, **config.argparse_options(hint))
    for name, text in NEUTRAL_FLAGS.items():
        parser.add_argument(_flag(name), action="store_true", help=text)
    return parser


def _checked(name: str, value: Any, hint: Any, path: str) -> Any:
    """Returns a YAML value, checked against the field's type; only int becomes float."""
    try:
        return pydantic.TypeAdapter(hint).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        message = error.errors()[0]["msg"]
        raise errors.ConfigError(f"{name}={value!r} in {path}: {message}") from error


def _fields() -> dict[str, Any]:
    return {
        **typing.get_type_hints(config.EngineConfig),
        **typing.get_type_hints(config.ServerConfig),
    }


def _canonical(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
