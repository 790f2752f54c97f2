"""The options of one request, checked before any device work.

There are two groups: `SamplingParams` (SGLang's and vLLM's names) and `DllmParams` (the
denoising options, which are per request here and per server elsewhere). The engine obeys a
value, or the value is neutral, or a `RequestError` that names the field refuses it; the engine
drops no value silently. The table of `algorithms` declares the denoising options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdllm import errors, value_checks
from jdllm.algorithms import limits, lookup
from jdllm.foreign import fields, names, neutral_values
from jdllm.options import logit_options, stop_options

# A temperature below the first is greedy (SGLang's rule); one between the two counts as the second,
# at which 16-bit states can still be divided by it (vLLM's rule).
GREEDY_BELOW, LEAST_TEMPERATURE = 1e-6, 0.01
MAX_TOP_LOGPROBS = 20  # OpenAI's
STREAM_MODES = ("block", "denoise")  # what a stream shows: final tokens, or also each step
# Fields that are numbers, their checks and their bounds; None stands for a default.
_NUMBERS: tuple[tuple[str, Callable[..., float], dict[str, Any]], ...] = (
    ("max_new_tokens", value_checks.check_integer, {"low": 1}),
    ("temperature", value_checks.check_number, {"low": 0.0, "high": 100.0}),
    ("top_p", value_checks.check_number, {"low": 0.0, "high": 1.0}),
    ("top_k", value_checks.check_integer, {"low": -1}),
    ("seed", value_checks.check_integer, {"low": -(2**63), "high": 2**64 - 1}),
    ("min_p", value_checks.check_number, {"low": 0.0, "high": 1.0}),
    ("frequency_penalty", value_checks.check_number, {"low": -2.0, "high": 2.0}),
    ("presence_penalty", value_checks.check_number, {"low": -2.0, "high": 2.0}),
    ("repetition_penalty", value_checks.check_number, {"low": 0.01, "high": 100.0}),
    ("min_new_tokens", value_checks.check_integer, {"low": 0}),
    ("top_logprobs", value_checks.check_integer, {"low": 0, "high": MAX_TOP_LOGPROBS}),
)
_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "return_logprob",
    "return_step_map",
)


@dataclasses.dataclass(frozen=True, init=False, repr=False, slots=True)
class DllmParams:
    """Denoising options of one request, or the server's defaults.

    Each option of `algorithms` is an attribute, as in
    `DllmParams(algorithm="LowConfidence", threshold=0.9).threshold`; it is None if not given.

    `stream_mode` is no option of an algorithm: with "denoise" a stream also shows what the output
    looked like after each step.
    """

    algorithm: str | None
    stream_mode: str | None
    given: tuple[tuple[str, lookup.Value], ...]  # in the order of the table

    def __init__(
        self, /, *, algorithm: str | None = None, stream_mode: str | None = None, **options: Any
    ):
        if algorithm is not None and (
            not isinstance(algorithm, str) or algorithm not in lookup.TABLE
        ):
            hint = errors.nearest(algorithm, lookup.TABLE)
            raise errors.RequestError(
                f"unknown dLLM algorithm {errors.quote(algorithm)}{hint}", param="dllm.algorithm"
            )
        if stream_mode not in (None, *STREAM_MODES):
            raise errors.RequestError(
                f"stream_mode is one of {', '.join(STREAM_MODES)}, got {errors.quote(stream_mode)}",
                param="dllm.stream_mode",
            )
        known = lookup.option_names()
        for name in options:
            if name not in known:
                hint = names.hint(name, ("algorithm", "stream_mode", *known), _beside_dllm())
                raise errors.RequestError(
                    f"unknown dLLM option {errors.quote(name)}{hint}", param=f"dllm.{name}"
                )
        given = tuple(
            (name, lookup.checked(algorithm, name, options[name]))
            for name in known
            if options.get(name) is not None
        )
        object.__setattr__(self, "algorithm", algorithm)
        object.__setattr__(self, "stream_mode", stream_mode)
        object.__setattr__(self, "given", given)

    def __getattr__(self, name: str) -> Any:
        """Returns the option of that name, or None if it is not given."""
        for option, value in self.given:
            if option == name:
                return value
        if name in lookup.option_names():
            return None
        raise AttributeError(f"no denoising option {name!r}")

    def __repr__(self) -> str:
        values = {"algorithm": self.algorithm, **self.options}
        if self.stream_mode is not None:
            values["stream_mode"] = self.stream_mode
        return f"DllmParams({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def options(self) -> dict[str, lookup.Value]:
        """The given options by name."""
        return dict(self.given)

    def with_stream_mode(self, stream_mode: str) -> DllmParams:
        """Returns the same options with another stream mode."""
        return DllmParams(algorithm=self.algorithm, stream_mode=stream_mode, **self.options)

    @property
    def declared(self) -> lookup.Algorithm | None:
        """The algorithm's row of the table, or None if the server's default applies."""
        return None if self.algorithm is None else lookup.TABLE[self.algorithm]

    @property
    def forwards_whole_canvas(self) -> bool:
        """Whether every step of a full-attention row with these options forwards all of it."""
        declared = self.declared
        return declared is not None and declared.forwards_whole_canvas(self.cache_mode)

    @property
    def writes_whole_blocks(self) -> bool:
        """Whether the positions to write must form whole blocks."""
        return self.declared is not None and self.declared.whole_blocks

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> DllmParams:
        """Builds from a request's `dllm` object; unknown keys that ask for something are an error.

        An empty value of an option is none (`neutral_values`), except for `false` of a flag.
        """
        if not isinstance(options, Mapping):
            raise errors.RequestError(
                f"dllm must be an object, got {type(options).__name__}", param="dllm"
            )
        known = {"algorithm", "stream_mode", *lookup.option_names()}
        given: dict[str, Any] = {}
        foreign: dict[str, Any] = {}
        for name, value in ((str(name), value) for name, value in options.items()):
            if name not in known:
                foreign[name] = value
                continue
            is_off = value is False and lookup.is_flag(name)
            if is_off or not (value is None or neutral_values.is_empty(value)):
                given[name] = value
        try:
            neutral_values.check(foreign, {}, known, places=_beside_dllm())
        except errors.RequestError as error:
            raise errors.RequestError(str(error), param=f"dllm.{error.param}") from error
        return cls(**given)

    def resolve(self, default: DllmParams) -> DllmParams:
        """Returns options with every field of the chosen algorithm filled in.

        `default` holds the server's options. They apply only if the request keeps the server's
        algorithm. An option that the algorithm does not have is an error, also if it only lacks it
        with the words of other options. So are two options that exclude one another; if the request
        gives one of them, it unsets the others.
        """
        name = self.algorithm or default.algorithm or next(iter(lookup.TABLE))
        own = DllmParams(algorithm=name, stream_mode=None, **self.options)
        declared = lookup.TABLE[name]
        values = declared.defaults
        if name == default.algorithm:
            values |= default.options
        values |= own.options
        given = [option for option in declared.alternatives if option in own.options]
        if len(given) > 1:
            raise errors.RequestError(
                f"{' and '.join(given)} of {name} exclude one another; give one",
                param=f"dllm.{given[0]}",
            )
        # If the request gives none of them, the first one with a default applies.
        chosen = given or [one for one in declared.alternatives if values[one] is not None]
        values |= {one: None for one in declared.alternatives if one != chosen[0]}
        for option in declared.without_meaning(values):
            if option.name in own.options and option.only_with is not None:
                other, words = option.only_with
                raise errors.RequestError(
                    f"{option.name} of {name} has no meaning with {other}={values[other]}; only "
                    f"with {' or '.join(words)}",
                    param=f"dllm.{option.name}",
                )
            values[option.name] = None
        return DllmParams(algorithm=name, stream_mode=self.stream_mode, **values)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request. `max_tokens` is an alias of `max_new_tokens`.

    None means the default of the model (temperature, top_p, top_k, min_p, repetition_penalty) or of
    the caller (`max_new_tokens`: the rest of the context). `return_logprob` asks for the
    log-probability of each output token in the step that wrote it, `top_logprobs` also for the
    most probable tokens of that step; `logprobs` is vLLM's form of both, a number of tokens or
    true. `return_step_map` asks for the number of that step within its block, counted from 1.

    docs/algorithms.md defines what edits the logits: penalties, `logit_bias`, `allowed_token_ids`,
    `bad_words` and `min_new_tokens` (alias `min_tokens`).
    """

    max_new_tokens: int | None = None
    max_tokens: int | None = None
    min_new_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    # A mapping of ids, or of their digits; kept as sorted pairs.
    logit_bias: Any = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logprobs: int | bool | None = None
    return_logprob: bool = False
    top_logprobs: int = 0
    return_step_map: bool = False
    dllm: DllmParams = dataclasses.field(default_factory=DllmParams)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        for name, alias in (("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens")):
            put(name, _one_of(self, name, alias))
            put(alias, None)
        put("stop", stop_options.strings(self.stop))
        put("stop_token_ids", stop_options.token_ids(self.stop_token_ids))
        if not isinstance(self.dllm, DllmParams):
            put("dllm", DllmParams.from_mapping(self.dllm))
        for name, value in _of_logprobs(self.logprobs, self.top_logprobs).items():
            put(name, value)
        for name, check, bounds in _NUMBERS:
            if getattr(self, name) is not None:
                put(name, check(getattr(self, name), name, **bounds))
        if self.temperature is not None:
            put("temperature", _steady(self.temperature))
        if self.top_p == 0:  # the nucleus is the most probable token alone
            put("temperature", 0.0)
            put("top_p", 1.0)
        put("n", value_checks.check_integer(self.n, "n", low=1, high=128))
        for name in _FLAGS:
            value_checks.check_flag(getattr(self, name), name)
        put("logit_bias", logit_options.biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", logit_options.allowed_ids(self.allowed_token_ids))
        put("bad_words", logit_options.bad_words(self.bad_words))
        if self.top_logprobs and not self.return_logprob:
            raise errors.RequestError(
                f"top_logprobs={self.top_logprobs} needs return_logprob", param="top_logprobs"
            )
        least, most = self.min_new_tokens or 0, self.max_new_tokens
        if most is not None and least > most:
            raise errors.RequestError(
                f"min_new_tokens={least} exceeds max_new_tokens={most}", param="min_new_tokens"
            )
        if self.dllm.declared is not None:
            limits.check(
                self.dllm.declared,
                temperature=self.temperature,
                filters={"top_p": self.top_p, "top_k": self.top_k},
                min_new_tokens=self.min_new_tokens,
            )

    @property
    def edits_logits(self) -> bool:
        """Whether a step changes the row's logits before it proposes tokens."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or (self.repetition_penalty or 1) != 1
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_new_tokens
            or (self.min_p and self.temperature)  # narrows a draw; the best token always passes
        )

    @property
    def needs_logits(self) -> bool:
        """Whether the launches of the row must compute its logits, not only their statistics."""
        return self.edits_logits or self.top_logprobs > 0

    @property
    def shows_steps(self) -> bool:
        """Whether a stream shows what the output looked like after each step."""
        return self.dllm.stream_mode == "denoise"

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Builds from a request's JSON object; foreign fields pass if they ask for nothing.

        An empty value is none (`neutral_values`), except for `false` of a flag, and for an empty
        list of allowed tokens, with which nothing could be written.
        """
        if not isinstance(options, Mapping):
            raise errors.RequestError(
                f"sampling_params must be an object, got {type(options).__name__}",
                param="sampling_params",
            )
        known = {field.name for field in dataclasses.fields(cls)}
        aliases = {"sampling_seed": "seed", "top_logprobs_num": "top_logprobs"}
        values: dict[str, Any] = {}
        foreign: dict[str, Any] = {}
        for key, value in options.items():
            name = aliases.get(key, key)
            if name in known:
                is_meant = name == "allowed_token_ids" or (value is False and name in _FLAGS)
                if value is not None and (is_meant or not neutral_values.is_empty(value)):
                    values[name] = value
            else:
                foreign[key] = value
        neutral_values.check(foreign, fields.NEUTRAL_ONLY, known, places=lookup.places("dllm.{}"))
        return cls(**values)


SamplingParams.__init__ = names.explained(lookup.places("dllm.{}"))(SamplingParams.__init__)


def _beside_dllm() -> names.Places:
    return {"{} beside dllm": SamplingParams.__dataclass_fields__}


def check_neutral(key: str, value: Any, known: Sequence[str] | set[str]) -> None:
    """Raises if `key` is no field of this engine and `value` asks for something."""
    neutral_values.check({key: value}, fields.NEUTRAL_ONLY, known)


def _of_logprobs(wanted: Any, top_logprobs: Any) -> dict[str, Any]:
    """Returns what vLLM's `logprobs`, a number of tokens or a flag, says in our two options."""
    if wanted is None or wanted is False:
        return {"logprobs": None}
    count = top_logprobs
    if wanted is not True:
        count = value_checks.check_integer(wanted, "logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if top_logprobs not in (0, count):
        raise errors.RequestError(
            f"logprobs={count} and top_logprobs={errors.quote(top_logprobs)} disagree; give one",
            param="logprobs",
        )
    return {"logprobs": None, "return_logprob": True, "top_logprobs": count}


def _steady(temperature: float) -> float:
    """Returns a temperature that logits can be divided by: 0 is greedy."""
    if temperature < GREEDY_BELOW:
        return 0.0
    return max(float(temperature), LEAST_TEMPERATURE)


def _one_of(params: SamplingParams, name: str, alias: str) -> int | None:
    first, second = getattr(params, name), getattr(params, alias)
    if first is not None and second is not None and first != second:
        shown = [errors.quote(value) for value in (first, second)]
        raise errors.RequestError(
            f"{name}={shown[0]} and {alias}={shown[1]} disagree; give one", param=alias
        )
    return first if first is not None else second
