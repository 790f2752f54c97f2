"""Start-up options: one frozen dataclass for the engine, one for the server.

Names are SGLang's with underscores; `server/cli.py` derives the command line from the fields.
`jdllm/foreign/flags.py` knows what becomes of flags of SGLang and vLLM that are no fields.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import yaml

from jdllm import errors
from jdllm.algorithms import lookup as algorithms
from jdllm.options import batching_rules
from jdllm.options import hints as option_hints

LoadFormat = Literal["auto", "safetensors", "orbax", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["fp8"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
LOAD_FORMATS: tuple[str, ...] = typing.get_args(LoadFormat)
DTYPES: tuple[str, ...] = typing.get_args(Dtype)
# Options that only models that write text have.
TEXT_OPTIONS = frozenset(
    [
        "tokenizer_path",
        "skip_tokenizer_init",
        "chat_template",
        "escape_special_tokens",
        "context_length",
        "max_total_tokens",
        "page_size",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "num_continuous_decode_steps",
        "disable_fused_commit",
        "disable_draft_adapter",
        "schedule_policy",
        "disable_radix_cache",
        "dllm_algorithm",
        "dllm_algorithm_config",
        "ep_size",
        "disable_custom_all_reduce",
    ]
)
# Options that only models that make images have.
IMAGE_OPTIONS = frozenset(
    [
        "batching_mode",
        "batching_max_size",
        "batching_delay_ms",
        "batching_config",
        "enable_batching_metrics",
        "warmup_resolutions",
        "max_image_pixels",
        "enable_step_cache",
        "text_encoder_cpu_offload",
        "quantization",
        "variant",
    ]
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of the engine; the defaults serve the bundled model.

    Sizes are in tokens, requests or pages. `mem_fraction_static` is the share of device memory for
    weights and KV together (GPU only), and for images also for what launches need. None means that
    the engine chooses the value from the model, the checkpoint or the memory. Some options are
    only for models that write text, others (from `batching_mode` on) only for models that make
    images: `check_for` refuses the others.
    """

    model_path: str | None = None
    tokenizer_path: str | None = None
    served_model_name: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: LoadFormat = "auto"
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    escape_special_tokens: bool = True
    dtype: Dtype = "auto"
    context_length: int | None = None
    mem_fraction_static: float = 0.85
    max_total_tokens: int | None = None
    page_size: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    num_continuous_decode_steps: int = 4
    disable_fused_commit: bool = False
    disable_draft_adapter: bool = False
    disable_overlap_schedule: bool = False
    schedule_policy: Literal["fcfs", "lpm"] = "fcfs"
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    disable_radix_cache: bool = False
    dllm_algorithm: str | None = None
    dllm_algorithm_config: str | Mapping[str, Any] | None = None
    random_seed: int = 0
    log_level: LogLevel = "info"
    decode_log_interval: int = 40
    tp_size: int = 1
    ep_size: int | None = None
    disable_custom_all_reduce: bool = False
    batching_mode: Literal["dynamic"] = "dynamic"
    batching_max_size: int | None = None
    batching_delay_ms: float = 0.0
    batching_config: str | Mapping[str, Any] | None = None
    enable_batching_metrics: bool = False
    warmup_resolutions: str | None = None
    max_image_pixels: int | None = None
    enable_step_cache: bool = False
    text_encoder_cpu_offload: bool = False
    quantization: Quantization | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        for name in (
            "context_length",
            "max_total_tokens",
            "page_size",
            "max_running_requests",
            "chunked_prefill_size",
            "max_prefill_tokens",
            "num_continuous_decode_steps",
            "decode_log_interval",
            "tp_size",
            "ep_size",
            "batching_max_size",
            "max_image_pixels",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.ConfigError(f"{name}={value!r} must be a positive integer")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise errors.ConfigError(
                f"max_queued_requests={self.max_queued_requests} must be 0 or more"
            )
        if not 0.0 < self.mem_fraction_static < 1.0:
            raise errors.ConfigError(
                f"mem_fraction_static={self.mem_fraction_static} must lie between 0 and 1"
            )
        if self.schedule_low_priority_values_first and not self.enable_priority_scheduling:
            raise errors.ConfigError(
                "schedule_low_priority_values_first needs enable_priority_scheduling"
            )
        if not 0 <= self.batching_delay_ms < math.inf:
            raise errors.ConfigError(
                f"batching_delay_ms={self.batching_delay_ms} must be 0 or more milliseconds"
            )
        self.algorithms()
        self.algorithm_options()
        self.batching_rules()

    def check_for(self, makes: Literal["text", "images"]) -> None:
        """Raises a ConfigError for an option that only models of the other kind have."""
        others = IMAGE_OPTIONS if makes == "text" else TEXT_OPTIONS
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in others and value != field.default:
                raise errors.ConfigError(
                    f"{field.name}={errors.quote(value)} has no meaning for this model, which "
                    f"makes {makes}; leave it out"
                )

    def batching_rules(self) -> tuple[batching_rules.BatchingRule, ...]:
        """Returns the rules in `batching_config` (an object or a JSON file), checked."""
        return () if self.batching_config is None else batching_rules.parse(self.batching_config)

    def algorithms(self) -> tuple[str, ...]:
        """Returns the algorithms that `dllm_algorithm` names ("A" or "A,B"), or () if unset."""
        if self.dllm_algorithm is None:
            return ()
        names = tuple(part.strip() for part in self.dllm_algorithm.split(","))
        for name in names:
            if name not in algorithms.TABLE:
                hint = errors.nearest(name, algorithms.TABLE)
                raise errors.ConfigError(f"unknown dllm_algorithm {name!r}{hint}")
        return tuple(dict.fromkeys(names))

    def algorithm_options(self) -> dict[str, Any]:
        """Returns the options in `dllm_algorithm_config` (a dict or a YAML file), checked."""
        source = self.dllm_algorithm_config
        if source is None:
            return {}
        options = source if isinstance(source, Mapping) else read_yaml(source)
        known = ("block_size", *algorithms.option_names())
        for key in options:
            if key not in known:
                hint = option_hints.of_default(str(key), known)
                raise errors.ConfigError(f"unknown key {key!r} in dllm_algorithm_config{hint}")
        block_size = options.get("block_size")
        if block_size is not None and (not matches(block_size, int) or block_size < 1):
            raise errors.ConfigError(f"{block_size=} in dllm_algorithm_config must be positive")
        return dict(options)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The options of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 30000
    replicas: int = 1
    api_key: str | None = dataclasses.field(default=None, repr=False)
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    api_key_file: str | None = None
    admin_api_key_file: str | None = None
    metrics_require_api_key: bool = False
    enable_metrics: bool = False
    log_level_http: LogLevel = "warning"
    max_body_bytes: int = 8 * 1024 * 1024
    max_choices_per_request: int = 4096
    drain_timeout_s: float = 30.0
    skip_server_warmup: bool = False
    strict_model_name: bool = False
    cors_allow_origins: str = "*"
    timeout_keep_alive: float = 5.0
    timeout_read_request: float = 60.0
    profile_dir: str | None = None
    disable_playground: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        if not 0 <= self.port <= 65535:
            raise errors.ConfigError(f"port={self.port} must be between 0 and 65535")
        if self.replicas < 1:
            raise errors.ConfigError(f"replicas={self.replicas} must be 1 or more")
        if self.max_choices_per_request < 1:
            raise errors.ConfigError(
                f"max_choices_per_request={self.max_choices_per_request} must be 1 or more"
            )
        if not self.drain_timeout_s >= 0:  # written so that NaN is refused
            raise errors.ConfigError(
                f"drain_timeout_s={self.drain_timeout_s} must be 0 or more seconds"
            )
        for name in ("timeout_keep_alive", "timeout_read_request"):
            if not 0 < getattr(self, name) < math.inf:
                raise errors.ConfigError(f"{name}={getattr(self, name)} must be above 0 seconds")
        self._check_keys()

    def _check_keys(self) -> None:
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            # An empty key would be the key of everybody. The message must not show the value.
            if key is not None and not is_key(key):
                raise errors.ConfigError(
                    f"{name} must be printable ASCII without spaces, and not empty"
                )
            if key is not None and getattr(self, f"{name}_file") is not None:
                raise errors.ConfigError(f"give either {name} or {name}_file, not both")
        keys = (self.api_key, self.api_key_file, self.admin_api_key, self.admin_api_key_file)
        if self.metrics_require_api_key and not any(keys):
            raise errors.ConfigError(
                "metrics_require_api_key needs a key: api_key_file or admin_api_key_file"
            )

    def cors_origins(self) -> list[str]:
        """Returns the origins in `cors_allow_origins` ("A" or "A,B"); none turns CORS off."""
        parts = (part.strip() for part in self.cors_allow_origins.split(","))
        return [part for part in parts if part]


def is_key(text: str) -> bool:
    """Returns whether a text can be an API key: a header must be able to carry it."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def read_yaml(path: str | pathlib.Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file; a missing file or non-mapping is a ConfigError."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise errors.ConfigError(f"no such file: {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise errors.ConfigError(f"{path} must hold a mapping, not a {type(content).__name__}")
    return content


def parse_yaml(text: str, origin: str) -> Any:
    """Returns the value of a YAML text; a ConfigError, on one line, names its `origin`."""
    try:
        return yaml.load(text, _YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A ValueError: YAML's safe types include dates, and 2026-13-01 is none.
        reason = " ".join(str(error).split())
        raise errors.ConfigError(f"{origin} is not valid YAML: {reason}") from error


class _YamlLoader(yaml.SafeLoader):
    """Refuses a mapping that gives a key twice; YAML itself keeps the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {errors.quote(key.value)}", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def from_mapping(cls: type, values: Mapping[str, Any]) -> Any:
    """Builds a config dataclass; an unknown key is an error with the nearest match."""
    known = {field.name for field in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise errors.ConfigError(
                f"unknown option {key!r}{option_hints.of_start(str(key), known)}"
            )
    return cls(**values)


def matches(value: Any, hint: Any) -> bool:
    """Returns whether `value` is of a field's type; an int is a float, a bool is no int."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if origin is Mapping:
        return isinstance(value, Mapping)
    if hint is int or hint is float:
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    if hint in (bool, str, types.NoneType):
        return isinstance(value, hint)
    raise TypeError(f"no rule for options of type {hint}")


def argparse_options(hint: Any) -> dict[str, Any]:
    """Returns the argparse options of a flag for a field of this type."""
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    kinds = [kind for kind in (int, float) if hint == kind or kind in typing.get_args(hint)]
    return {"type": kinds[0] if kinds else str}


def _check_types(config: Any) -> None:
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
            object.__setattr__(config, field.name, value)
        if not matches(value, hint):
            # A field without a repr is a secret: the message must not show its value.
            shown = f"{field.name}={value!r}" if field.repr else field.name
            raise errors.ConfigError(f"{shown} must be {_describe(hint)}")


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(typing.get_args(hint))}"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint))
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return names.get(hint, "None" if hint is types.NoneType else "a mapping")
