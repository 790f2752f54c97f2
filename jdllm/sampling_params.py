"""What one request may ask for, validated before any device work.

Two groups: `SamplingParams` (SGLang's and vLLM's names) and `DllmParams` (the
denoising options, per request here though per server elsewhere). A value is
honoured, neutral, or refused with a `RequestError` that names the field; nothing
is dropped. The table `ALGORITHM_OPTIONS` is the single list of algorithms and
their options with defaults; `decoding/` implements exactly these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jdllm import errors

# Defaults of SGLang 0.5.23 (low_confidence.py, joint_threshold.py) and of the papers' releases.
# None: not set.
ALGORITHM_OPTIONS: dict[str, dict[str, float | int | str | None]] = {
    "LowConfidence": {"threshold": 0.95},
    "JointThreshold": {
        "threshold": 0.5,
        "edit_threshold": 0.0,
        "max_post_edit_steps": 16,
        "penalty_lambda": 0.0,
    },
    "FullAttnMultiBlock": {
        "threshold": 0.5,
        "block_add_threshold": 0.1,
        "decoded_token_threshold": 0.95,
        "early_stop": True,
        "cache_mode": "exact",
        "cache_delay_iter": 2,
        "refresh_interval": 3,
        "block_length": 32,
    },
    "EntropyThreshold": {"threshold": 0.95, "block_length": 32},
    "LLaDA": {
        "steps": None,
        "block_length": 32,
        "remasking": "low_confidence",
        "cfg_scale": 0.0,
    },
    "Dream": {"steps": None, "alg": "origin", "alg_temp": 0.0, "eps": 1e-3},
    "FastDLLM": {
        "threshold": 0.9,
        "factor": None,
        "steps": None,
        "block_length": 32,
        "cache_mode": "none",
    },
}

# The words an option may hold; on the device each is its place in this list.
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "FullAttnMultiBlock": {"cache_mode": ("exact", "delayed", "window")},
    "LLaDA": {"remasking": ("low_confidence", "random")},
    "Dream": {"alg": ("origin", "maskgit_plus", "topk_margin", "entropy")},
    "FastDLLM": {"cache_mode": ("none", "prefix", "dual")},
}

_WITHOUT_CACHE = ("exact", "none")  # modes of `cache_mode`

# Those of models that see their whole sequence; the others write block after block.
CANVAS_ALGORITHMS: frozenset[str] = frozenset(
    {"FullAttnMultiBlock", "EntropyThreshold", "LLaDA", "Dream", "FastDLLM"}
)
# Whose `threshold` is an entropy, which has no upper bound; elsewhere it is a probability.
_ENTROPY_ALGORITHMS = frozenset({"FullAttnMultiBlock", "EntropyThreshold"})
# Options of which a request gives one; it holds instead of the others.
_ALTERNATIVES: dict[str, tuple[str, ...]] = {"FastDLLM": ("factor", "steps", "threshold")}

MAX_STOP_STRINGS = 16

# Fields other engines know; a value other than the neutral one is refused by name.
NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_new_tokens": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, [], ()),
    "custom_params": (None, {}),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "lora_path": (None,),
    "logprobs": (None, False, 0),
    "prompt_logprobs": (None, False, 0),
    "stream_interval": (None, 1),
    "spaces_between_special_tokens": (None, True),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DllmParams:
    """Denoising options of one request; None means the server's default.

    `threshold` is what a masked position must pass to be written: a confidence to be above,
    or an entropy in nats to be below. `edit_threshold` is the confidence above which a written
    token may be replaced. `block_add_threshold` and `decoded_token_threshold` are shares of a
    block that are written when the next one is created and fully activated.
    """

    algorithm: str | None = None
    threshold: float | None = None
    edit_threshold: float | None = None
    max_post_edit_steps: int | None = None
    penalty_lambda: float | None = None
    block_length: int | None = None
    block_add_threshold: float | None = None
    decoded_token_threshold: float | None = None
    early_stop: bool | None = None
    cache_mode: str | None = None
    cache_delay_iter: int | None = None
    refresh_interval: int | None = None
    steps: int | None = None
    remasking: str | None = None
    cfg_scale: float | None = None
    alg: str | None = None
    alg_temp: float | None = None
    eps: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        if self.algorithm is not None and self.algorithm not in ALGORITHM_OPTIONS:
            hint = errors.nearest(str(self.algorithm), ALGORITHM_OPTIONS)
            raise errors.RequestError(
                f"unknown dLLM algorithm {self.algorithm!r}{hint}", param="dllm.algorithm"
            )
        # Without an algorithm the bound of `threshold` is not known yet; `resolve` names one.
        is_open = self.algorithm is None or self.algorithm in _ENTROPY_ALGORITHMS
        bound = math.inf if is_open else 1.0
        _check_number(self.threshold, "dllm.threshold", low=0.0, high=bound)
        for name in ("edit_threshold", "block_add_threshold", "decoded_token_threshold", "eps"):
            _check_number(getattr(self, name), f"dllm.{name}", low=0.0, high=1.0)
        for name in ("penalty_lambda", "cfg_scale", "alg_temp"):
            _check_number(getattr(self, name), f"dllm.{name}", low=0.0)
        _check_number(self.factor, "dllm.factor", low=0.0, open_low=True)
        _check_integer(self.max_post_edit_steps, "dllm.max_post_edit_steps", low=0, high=4096)
        _check_integer(self.cache_delay_iter, "dllm.cache_delay_iter", low=0)
        for name in ("block_length", "refresh_interval", "steps"):
            _check_integer(getattr(self, name), f"dllm.{name}", low=1)
        for name in ("cache_mode", "remasking", "alg"):
            _check_word(getattr(self, name), name, self.algorithm)
        if not isinstance(self.early_stop, bool | None):
            raise errors.RequestError(
                f"dllm.early_stop must be true or false, got {self.early_stop!r}",
                param="dllm.early_stop",
            )

    @property
    def forwards_whole_canvas(self) -> bool:
        """Whether every forward of a full-attention row with these options is one of all of it."""
        if "cache_mode" in ALGORITHM_OPTIONS.get(self.algorithm or "", {}):
            return self.cache_mode in _WITHOUT_CACHE
        return self.algorithm in CANVAS_ALGORITHMS

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> DllmParams:
        """Builds from a request's `dllm` object; unknown keys are an error."""
        if not isinstance(options, Mapping):
            raise errors.RequestError(
                f"dllm must be an object, got {type(options).__name__}", param="dllm"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        for key in options:
            if key not in known:
                raise errors.RequestError(
                    f"unknown dLLM option {key!r}{errors.nearest(str(key), known)}",
                    param=f"dllm.{key}",
                )
        return cls(**options)

    def resolve(self, default: DllmParams) -> DllmParams:
        """Returns options with every field of the chosen algorithm filled in.

        `default` is the server's: its values apply only when the request keeps the
        server's algorithm. An option that the algorithm does not have is an error, and so are
        two that exclude one another; one of these unsets the others.
        """
        algorithm = self.algorithm or default.algorithm or next(iter(ALGORITHM_OPTIONS))
        known = ALGORITHM_OPTIONS[algorithm]
        values: dict[str, Any] = dict(known)
        if algorithm == default.algorithm:
            values |= {k: getattr(default, k) for k in known if getattr(default, k) is not None}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "algorithm" or value is None:
                continue
            if field.name not in known:
                raise errors.RequestError(
                    f"{algorithm} has no option {field.name!r}; it has {', '.join(known)}",
                    param=f"dllm.{field.name}",
                )
            values[field.name] = value
        alternatives = _ALTERNATIVES.get(algorithm, ())
        given = [name for name in alternatives if getattr(self, name) is not None]
        if len(given) > 1:
            raise errors.RequestError(
                f"{' and '.join(given)} of {algorithm} exclude one another; give one",
                param=f"dllm.{given[0]}",
            )
        # Of the server's defaults the first that is set holds.
        chosen = given or [name for name in alternatives if values[name] is not None]
        values |= {name: None for name in alternatives if name != chosen[0]}
        return DllmParams(algorithm=algorithm, **values)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request. `max_tokens` is an alias of `max_new_tokens`.

    None means the default of the model (temperature, top_p, top_k) or of the
    caller (`max_new_tokens`: what remains of the context). `return_logprob` asks for the
    log-probability of each output token in the step that wrote it, `return_step_map` for
    the number of that step within its block, from 1.
    """

    max_new_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    return_logprob: bool = False
    return_step_map: bool = False
    dllm: DllmParams = dataclasses.field(default_factory=DllmParams)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("max_new_tokens", _one_of(self.max_new_tokens, self.max_tokens))
        put("max_tokens", None)
        put("stop", (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop, "stop"))
        put("stop_token_ids", _tuple(self.stop_token_ids, "stop_token_ids"))
        if not isinstance(self.dllm, DllmParams):
            put("dllm", DllmParams.from_mapping(self.dllm))
        _check_integer(self.max_new_tokens, "max_new_tokens", low=1)
        _check_number(self.temperature, "temperature", low=0.0, high=100.0)
        _check_number(self.top_p, "top_p", low=0.0, high=1.0, open_low=True)
        _check_integer(self.top_k, "top_k", low=-1)
        _check_integer(self.seed, "seed", low=-(2**63), high=2**64 - 1)
        if self.n is None:
            raise errors.RequestError("n must be an integer, got None", param="n")
        _check_integer(self.n, "n", low=1, high=128)
        for name in (
            "ignore_eos", "skip_special_tokens", "no_stop_trim", "return_logprob",
            "return_step_map",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise errors.RequestError(
                    f"{name} must be true or false, got {getattr(self, name)!r}", param=name
                )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise errors.RequestError(
                f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop"
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise errors.RequestError("stop strings must be non-empty strings", param="stop")
        for token_id in self.stop_token_ids:
            _check_integer(token_id, "stop_token_ids", low=0)
        self._check_filters()

    def _check_filters(self) -> None:
        """Raises for top_p and top_k of algorithms that draw from the whole distribution."""
        if self.dllm.algorithm not in CANVAS_ALGORITHMS:
            return
        for name, neutral in (("top_p", (None, 1)), ("top_k", (None, 0, -1))):
            value = getattr(self, name)
            if value not in neutral:
                raise errors.RequestError(
                    f"{name}={value!r} is not supported by {self.dllm.algorithm}; leave it out, "
                    "temperature and seed are supported",
                    param=name,
                )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Builds from a request's JSON object; neutral foreign fields pass, others fail."""
        if not isinstance(options, Mapping):
            raise errors.RequestError(
                f"sampling_params must be an object, got {type(options).__name__}",
                param="sampling_params",
            )
        known = {field.name for field in dataclasses.fields(cls)}
        aliases = {"sampling_seed": "seed"}
        values: dict[str, Any] = {}
        for key, value in options.items():
            name = aliases.get(key, key)
            if name in known:
                if value is not None:
                    values[name] = value
            else:
                check_neutral(key, value, known)
        return cls(**values)


def check_neutral(key: str, value: Any, known: Sequence[str] | set[str]) -> None:
    """Raises unless `key` is a known foreign field holding its neutral value."""
    if key not in NEUTRAL_ONLY:
        raise errors.RequestError(
            f"unknown parameter {key!r}{errors.nearest(key, set(known) | set(NEUTRAL_ONLY))}",
            param=key,
        )
    allowed = NEUTRAL_ONLY[key]
    if not any(value == neutral and type(value) is type(neutral) for neutral in allowed):
        raise errors.RequestError(
            f"{key}={value!r} is not supported by this engine; leave it out", param=key
        )


def _tuple(value: Any, param: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise errors.RequestError(f"{param} must be a list, got {value!r}", param=param)
    return tuple(value)


def _one_of(first: int | None, second: int | None) -> int | None:
    if first is not None and second is not None and first != second:
        raise errors.RequestError(
            f"max_new_tokens={first} and max_tokens={second} disagree; give one",
            param="max_tokens",
        )
    return first if first is not None else second


def _check_number(
    value: Any, param: str, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise errors.RequestError(f"{param} must be a finite number, got {value!r}", param=param)
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise errors.RequestError(
            f"{param}={value!r} is outside {bracket}{low:g}, {high:g}]", param=param
        )


def _check_word(value: Any, name: str, algorithm: str | None) -> None:
    """Raises unless `value` is a word of option `name`, of any algorithm if none is named."""
    owners = CHOICES if algorithm is None else (algorithm,)
    words = [word for owner in owners for word in CHOICES.get(owner, {}).get(name, ())]
    # An option that the algorithm lacks is refused as such when it is resolved.
    if value is not None and words and value not in words:
        raise errors.RequestError(
            f"unknown dllm.{name}={value!r}{errors.nearest(str(value), words)}",
            param=f"dllm.{name}",
        )


def _check_integer(value: Any, param: str, *, low: int, high: int = 2**31 - 1) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise errors.RequestError(f"{param} must be an integer, got {value!r}", param=param)
    if not low <= value <= high:
        raise errors.RequestError(
            f"{param}={value!r} must be between {low} and {high}", param=param
        )
