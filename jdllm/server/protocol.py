"""Request bodies: the typed fields that each route reads, and the errors for bad bodies.

A body must be JSON with the right content type; anything else is a 400. Types are strict ("5"
is not 5), because a silent conversion would change what was asked for. Ranges are checked in
one place, `SamplingParams`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import orjson
import pydantic
from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr
from starlette import requests

from jdllm import errors, sampling_params, value_checks
from jdllm.server import foreign_fields

MAX_COMPLETION_LOGPROBS = 5  # OpenAI's
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "dllm",
)


class RequestModel(pydantic.BaseModel):
    """A body; further fields must be in `foreign` with a neutral value, or they are refused."""

    model_config = pydantic.ConfigDict(extra="allow", protected_namespaces=())
    foreign: ClassVar[foreign_fields.Neutral] = {}

    @pydantic.model_validator(mode="after")
    def _refuse_foreign(self) -> RequestModel:
        foreign_fields.check(self.model_extra or {}, self.foreign, type(self).model_fields)
        return self


class StreamOptions(RequestModel):
    foreign: ClassVar = foreign_fields.STREAM_OPTIONS
    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class OpenAIRequest(RequestModel):
    """What chat and text completions share."""

    model: StrictStr | None = None
    max_tokens: StrictInt | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    presence_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    logit_bias: Any = None
    allowed_token_ids: list[StrictInt] | None = None
    bad_words: Any = None
    min_tokens: StrictInt | None = None
    logprobs: Any = None
    seed: StrictInt | None = None
    n: StrictInt | None = None
    stop: Any = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    no_stop_trim: StrictBool | None = None
    dllm: Any = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    rid: StrictStr | None = None
    return_cached_tokens_details: StrictBool | None = None
    best_of: StrictInt | None = None

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> OpenAIRequest:
        if self.stream_options is not None and not self.stream:
            raise errors.RequestError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        if self.best_of not in (None, 1, self.n):
            raise errors.RequestError(
                f"best_of={self.best_of} is not supported; leave it out or equal to n",
                param="best_of",
            )
        if self.rid == "":
            raise errors.RequestError("rid must not be empty", param="rid")
        return self

    def wanted_tokens(self) -> tuple[str, int | None]:
        """Returns the field that limits the output, and its value."""
        return "max_tokens", self.max_tokens

    def num_top_logprobs(self) -> int | None:
        """Returns how many tokens to list beside each output token; None: no log-probabilities."""
        raise NotImplementedError

    def field_names(self) -> dict[str, str]:
        """Maps the engine's names of fields, which its errors use, to this body's names."""
        return {"max_new_tokens": self.wanted_tokens()[0], "min_new_tokens": "min_tokens"}

    def sampling(self, default_max_tokens: int) -> sampling_params.SamplingParams:
        """Returns the checked options; errors use the names of this body's fields."""
        _, wanted = self.wanted_tokens()
        options = {key: getattr(self, key) for key in SAMPLING_FIELDS}
        options["max_new_tokens"] = default_max_tokens if wanted is None else wanted
        count = self.num_top_logprobs()
        if count is not None:
            options |= {"return_logprob": True, "top_logprobs": count}
        try:
            return sampling_from(options)
        except errors.RequestError as error:
            raise renamed(error, self.field_names()) from error


class TextPart(RequestModel):
    type: StrictStr
    text: StrictStr


class Message(RequestModel):
    foreign: ClassVar = foreign_fields.MESSAGE
    role: StrictStr
    content: Any = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Message:
        if self.role not in ("system", "user", "assistant"):
            raise errors.RequestError(
                f"role={self.role!r} must be system, user or assistant", param="role"
            )
        self.content = _content_text(self.content)
        return self


class ChatRequest(OpenAIRequest):
    foreign: ClassVar = foreign_fields.CHAT
    messages: list[Message]
    top_logprobs: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if not self.messages:
            raise errors.RequestError("messages must not be empty", param="messages")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise errors.RequestError(
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} disagree; give one",
                param="max_completion_tokens",
            )
        return self

    def num_top_logprobs(self) -> int | None:
        if self.logprobs is not None:
            value_checks.check_flag(self.logprobs, "logprobs")
        if self.top_logprobs and not self.logprobs:
            raise errors.RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def wanted_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().wanted_tokens()

    def field_names(self) -> dict[str, str]:
        return super().field_names() | {"prompt": "messages", "input_ids": "messages"}


class CompletionRequest(OpenAIRequest):
    foreign: ClassVar = foreign_fields.OPENAI
    prompt: Any = None
    suffix: StrictStr | None = None

    def num_top_logprobs(self) -> int | None:
        if self.logprobs is None or self.logprobs is False:
            return None
        value_checks.check_integer(self.logprobs, "logprobs", low=0, high=MAX_COMPLETION_LOGPROBS)
        return self.logprobs

    def field_names(self) -> dict[str, str]:
        return super().field_names() | {"input_ids": "prompt"}


class GenerateRequest(RequestModel):
    foreign: ClassVar = foreign_fields.GENERATE
    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    stream: StrictBool | None = None
    rid: Any = None
    return_logprob: StrictBool | None = None
    top_logprobs_num: StrictInt | None = None
    return_text_in_logprobs: StrictBool | None = None
    return_step_map: StrictBool | None = None


class AbortRequest(RequestModel):
    rid: StrictStr | None = None
    abort_all: StrictBool | None = None


class TokenizeRequest(RequestModel):
    model: StrictStr | None = None
    prompt: Any = None
    messages: list[Message] | None = None
    add_special_tokens: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestModel):
    model: StrictStr | None = None
    tokens: Any = None
    skip_special_tokens: StrictBool | None = None


Body = TypeVar("Body", bound=RequestModel)


async def read(request: requests.Request, model: type[Body]) -> Body:
    """Returns the parsed body of `request`, or raises a `RequestError` naming the field."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise errors.RequestError(
            f"Content-Type must be application/json, got {content_type or 'none'!r}"
        )
    try:
        content = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise errors.RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise errors.RequestError(f"the body must be an object, got {type(content).__name__}")
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        raise _first_problem(error) from error


def sampling_from(options: dict[str, Any]) -> sampling_params.SamplingParams:
    """Returns checked options from JSON; a container of the wrong type is a 400, too."""
    for name, kinds in (("stop", (str, list)), ("stop_token_ids", (list,)), ("dllm", (dict,))):
        value = options.get(name)
        if value is not None and not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise errors.RequestError(
                f"{name} must be a {wanted}, got {reprlib.repr(value)}", param=name
            )
    return sampling_params.SamplingParams.from_mapping(options)


def renamed(error: errors.RequestError, names: Mapping[str, str]) -> errors.RequestError:
    """Returns `error` with the names that its fields have in the request's body."""
    if error.param is None:
        return error
    message = str(error)
    for limit in ("max_new_tokens", "min_new_tokens"):
        message = message.replace(limit, names.get(limit, limit))
    return type(error)(message, param=names.get(error.param, error.param), code=error.code)


def is_ids(value: Any) -> bool:
    """Says whether `value` is a non-empty list of integers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
    )


def _content_text(content: Any) -> str:
    """Returns the text of a message; its parts are joined by a space, as in SGLang."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise errors.RequestError(
            "content must be a string or a non-empty list of text parts", param="content"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise errors.RequestError(
                f"content part {kind!r} is not supported; use text parts",
                param=f"content.{i}",
            )
        try:
            texts.append(TextPart.model_validate(part).text)
        except pydantic.ValidationError as error:
            problem = _first_problem(error)
            raise errors.RequestError(str(problem), param=f"content.{i}.{problem.param}") from error
    return " ".join(texts)


def _first_problem(error: pydantic.ValidationError) -> errors.RequestError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, errors.RequestError):
        path += [cause.param] if cause.param else []
        return errors.RequestError(str(cause), param=".".join(path) or None, code=cause.code)
    name = ".".join(path)
    if first["type"] == "missing":
        return errors.RequestError(f"{name} is required", param=name)
    got = reprlib.repr(first["input"])
    return errors.RequestError(f"{name}: {first['msg']}, got {got}", param=name)
