"""Reads `--model_args name=value,name=value`, as lm-eval and the scripts of d3LLM spell them.

The names are those of LLaDA's, Dream's and d3LLM's evaluation scripts, beside our own: options of
the engine, of sampling, and of the algorithms. An unknown name is an error with the nearest one,
and so is a value that asks for what is not done here.

Without `algorithm`, the name `generation_method` (d3LLM) or `alg` (Dream), or `gen_length` together
with `steps` (d3LLM's default method), says which algorithm decodes, and which names it reads, as in
those scripts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.algorithms import lookup

ENGINE = (
    "model_path", "tokenizer_path", "revision", "load_format", "dtype", "context_length",
    "mem_fraction_static", "max_running_requests", "max_total_tokens", "page_size",
    "dllm_algorithm", "dllm_algorithm_config", "trust_remote_code", "chat_template",
)  # fmt: skip
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
SERVER = ("base_url", "api_key", "timeout_s")
LIKELIHOOD = ("mc_num", "is_check_greedy", "batch_size")
ALIASES = {
    "pretrained": "model_path",
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "max_length": "context_length",
    "max_model_len": "context_length",
    "gen_length": "max_new_tokens",
    "max_gen_toks": "max_new_tokens",
    "diffusion_steps": "steps",
    "cfg": "cfg_scale",
    "num_concurrent": "parallel",
}
# Names of the scripts that say how to decode; `_decoding` turns them into options.
METHOD = ("generation_method", "use_cache", "dual_cache")
OTHER = ("parallel", "show_speed", "mask_id", "device", "task")
# Names with values that change no result here; any other value is an error that says why.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "torch_compile": ((True, False), ""),
    "dParallel": ((True, False), ""),  # says which weights `pretrained` names
    "add_bos_token": ((None, False, True), ""),  # the checkpoint's tokenizer decides
    "save_dir": ((None, "", "null"), "use --output_path and --log_samples"),
    "max_batch_size": ((None,), "the engine forms batches by itself"),
}
FLAGS = ("is_check_greedy", "use_cache", "dual_cache", "show_speed")
NO_CACHE_DELAY = 10_000  # d3LLM: from this delay on nothing is cached
CACHE = ("cache_mode", "cache_delay_iter", "refresh_interval")
# The scripts take these with every method, and a method that does not read them drops them.
UNREAD = {
    "steps", "remasking", "alg", "block_length", "block_add_threshold", "decoded_token_threshold",
    "early_stop", *CACHE,
}  # fmt: skip
# generation_method -> algorithm
METHODS = {
    "generate": "LLaDA",  # EntropyThreshold if there is a threshold
    "generate_multi_block": "FullAttnMultiBlock",
    "generate_multi_block_kv_cache": "FullAttnMultiBlock",
    "generation_multi_block": "FullAttnMultiBlock",  # Dream's name
    "Fast_dllm_v1": "FastDLLM",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """What a line asks for; each dict holds given names only.

    `sampling` has the keys of `SamplingParams`, with `dllm` among them. `likelihood` has
    `mc_num`, `is_check_greedy` and `batch_size`.
    """

    engine: dict[str, Any]
    sampling: dict[str, Any]
    server: dict[str, Any]
    likelihood: dict[str, Any]
    parallel: int | None = None
    show_speed: bool = False
    mask_id: int | None = None
    device: str | None = None
    task: str | None = None

    def parallel_option(self) -> dict[str, int]:
        """Returns `parallel` as an option, or nothing."""
        return {} if self.parallel is None else {"parallel": self.parallel}


def split(line: str) -> dict[str, Any]:
    """Returns the names and values of `name=value,name=value`; the last of equal names counts."""
    values = {}
    for part in line.split(","):
        if not part.strip():
            continue
        name, equals, text = part.partition("=")
        if not equals or not name.strip():
            raise errors.ConfigError(f"--model_args: {errors.quote(part)} is not NAME=VALUE")
        values[name.strip()] = _value(text.strip())
    return values


def parse(given: Mapping[str, Any]) -> ModelArgs:
    """Sorts the names of a line, or of a Python call, by what they are for."""
    decoding_names = ("algorithm", *lookup.option_names())
    known = {*ENGINE, *SAMPLING, *SERVER, *LIKELIHOOD, *ALIASES, *METHOD, *OTHER, *NEUTRAL}
    known |= set(decoding_names)
    values: dict[str, Any] = {}
    for spelled, value in given.items():
        if spelled not in known:
            raise errors.ConfigError(
                f"--model_args: unknown name {errors.quote(spelled)}"
                f"{errors.nearest(spelled, known)}"
            )
        name = ALIASES.get(spelled, spelled)
        if name in values and values[name] != value:
            raise errors.ConfigError(f"--model_args: {spelled} is given twice with unequal values")
        values[name] = value
    for name, (allowed, instead) in NEUTRAL.items():
        if name in values and values[name] not in allowed:
            raise errors.ConfigError(
                f"--model_args: {name}={values[name]!r} is not supported; "
                f"{instead or 'leave it out'}"
            )
    values = {name: value for name, value in values.items() if value is not None}
    for name in FLAGS:
        if not isinstance(values.get(name, False), bool):
            raise errors.ConfigError(f"--model_args: {name}={values[name]!r} must be True or False")
    # Lines of d3LLM's scripts have both names, and decode by "generate" if nothing is said. A
    # length alone says nothing about how to decode, and many models have no such method.
    is_script = "gen_length" in given and "steps" in values
    if is_script and not {"algorithm", "alg", "generation_method"} & values.keys():
        values["generation_method"] = "generate"
    options = {name: values[name] for name in decoding_names if name in values}
    sampling = {name: values[name] for name in SAMPLING if name in values}
    server = {name: values[name] for name in SERVER if name in values}
    of_the_server = [name for name in (*ENGINE, "mask_id") if name in values]
    if "base_url" in server and of_the_server:
        raise errors.ConfigError(
            f"--model_args: {of_the_server[0]} is for evaluation in process; the server at "
            "base_url has its own model and options"
        )
    decoding = _decoding(options, {name: values[name] for name in METHOD if name in values})
    return ModelArgs(
        engine={name: values[name] for name in ENGINE if name in values},
        sampling=sampling | ({"dllm": decoding} if decoding else {}),
        server=server,
        likelihood={name: values[name] for name in LIKELIHOOD if name in values},
        parallel=_positive("num_concurrent", values.get("parallel")),
        show_speed=values.get("show_speed", False),
        mask_id=values.get("mask_id"),
        device=values.get("device"),
        task=values.get("task"),
    )


def check_machine(args: ModelArgs, *, platform: str) -> None:
    """Refuses a `device` that is not the one on which JAX computes."""
    if args.device is None or "base_url" in args.server:
        return
    name = str(args.device).partition(":")[0]
    # "cuda:0" is lm-eval's default, so it says nothing.
    if name not in ("cuda", platform):
        raise errors.ConfigError(
            f"device={args.device!r}, but JAX computes on {platform}; set JAX_PLATFORMS"
        )


def check_mask_id(args: ModelArgs, mask_id: int | None) -> None:
    """Refuses a `mask_id` that is not the model's."""
    if args.mask_id is not None and args.mask_id != mask_id:
        raise errors.ConfigError(f"mask_id={args.mask_id}, but the model's mask id is {mask_id}")


def _decoding(options: dict[str, Any], method: dict[str, Any]) -> dict[str, Any]:
    """Returns the `dllm` options that mean what the scripts mean by their names."""
    name = method.get("generation_method")
    alg = options.get("alg")
    if "algorithm" in options or (name is None and alg is None):
        if method:
            raise errors.ConfigError(
                f"--model_args: {next(iter(method))} needs generation_method instead of algorithm"
            )
        return options
    if name is not None and name not in METHODS:
        hint = errors.nearest(str(name), METHODS)
        raise errors.ConfigError(f"--model_args: unknown generation_method={name!r}{hint}")
    algorithm = METHODS.get(name) if name is not None else None
    if algorithm in (None, "LLaDA"):
        algorithm = _by_rule(alg, options) or algorithm
    if method.get("use_cache") and algorithm != "FastDLLM":
        raise errors.ConfigError(
            "--model_args: use_cache=True is for generation_method=Fast_dllm_v1; "
            "generate_multi_block_kv_cache is d3LLM's way with a cache"
        )
    assert algorithm is not None, "a method or `alg` is given"
    taken = set(lookup.TABLE[algorithm].defaults)
    found = {k: v for k, v in options.items() if k in taken or k not in UNREAD}
    if algorithm == "FullAttnMultiBlock":
        found = {k: v for k, v in found.items() if k not in CACHE}
        found |= _cache(options, has_cache=name != "generate_multi_block")
    if algorithm == "FastDLLM":
        rules = [k for k in ("factor", "threshold", "steps") if k in found]
        found = {k: v for k, v in found.items() if k not in rules[1:]}
        if method.get("use_cache"):
            found["cache_mode"] = "dual" if method.get("dual_cache") else "prefix"
    found["algorithm"] = algorithm
    return found


def _by_rule(alg: str | None, options: Mapping[str, Any]) -> str | None:
    """Returns the algorithm of Dream's `alg`, or of the presence of a threshold."""
    match alg:
        case "entropy_threshold":
            return "EntropyThreshold"
        case "confidence_threshold":
            return "FastDLLM"
        case None:
            return "EntropyThreshold" if "threshold" in options else None
    return "Dream"


def _cache(options: Mapping[str, Any], *, has_cache: bool) -> dict[str, Any]:
    """Returns the cache options of `FullAttnMultiBlock`; d3LLM's default is to cache nothing."""
    delay = options.get("cache_delay_iter", NO_CACHE_DELAY)
    if not has_cache or delay >= NO_CACHE_DELAY:
        return {"cache_mode": "exact"}
    return {
        "cache_mode": options.get("cache_mode", "delayed"),
        "cache_delay_iter": delay,
        "refresh_interval": options.get("refresh_interval", NO_CACHE_DELAY),
    }


def _value(text: str) -> Any:
    """Returns a number, True, False or None if the text spells one, else the text."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    word = {"true": True, "false": False, "none": None}
    if text.lower() in word:
        return word[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _positive(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise errors.ConfigError(f"--model_args: {name}={value!r} must be a positive integer")
    return value
