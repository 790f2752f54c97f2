"""Request bodies: the typed fields that each route reads, and the errors for bad bodies.

A body must be JSON with the right content type; anything else is a 400. Types are strict ("5"
is not 5), because a silent conversion would change what was asked for. Ranges are checked in
one place, `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
import pydantic
from pydantic import StrictBool, StrictFloat, StrictStr
from starlette import requests

from jdllm import errors, value_checks
from jdllm.algorithms import lookup
from jdllm.foreign import fields, neutral_values
from jdllm.host import offload
from jdllm.options import hints, logit_options, sampling_params, stop_options
from jdllm.server import body_limits, field_at_fault
from jdllm.server.conversation_fields import Messages, TemplateFields, refuse_tool_use
from jdllm.server.request_model import Integer, RequestModel, first_problem

MAX_RID_CHARACTERS = 256
# Parsing is that much faster than tokenising.
BYTES_PER_CHARACTER_OF_WORK = 4

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


class StreamOptions(RequestModel):
    foreign: ClassVar = fields.STREAM_OPTIONS
    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


StopTokenIds = Annotated[
    list[Integer], pydantic.Field(max_length=stop_options.MAX_TOKEN_IDS, fail_fast=True)
]
AllowedTokenIds = Annotated[
    list[Integer], pydantic.Field(max_length=logit_options.MAX_ALLOWED_IDS, fail_fast=True)
]


class OpenAIRequest(RequestModel):
    """What chat and text completions share."""

    places: ClassVar = lookup.places("dllm.{}")
    # No token at all could be written.
    meant_when_empty: ClassVar = frozenset({"allowed_token_ids"})
    model: StrictStr | None = None
    max_tokens: Integer | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: Integer | None = None
    min_p: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    presence_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    logit_bias: Any = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: Any = None
    min_tokens: Integer | None = None
    logprobs: Any = None
    seed: Integer | None = None
    n: Integer | None = None
    stop: Any = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    no_stop_trim: StrictBool | None = None
    dllm: Any = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    rid: StrictStr | None = None
    priority: Integer | None = None
    return_cached_tokens_details: StrictBool | None = None
    best_of: Integer | None = None

    @property
    def is_prompt_only(self) -> bool:
        """Whether no token is to be written: usage is counted, nothing runs."""
        return self.wanted_tokens()[1] == 0

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> OpenAIRequest:
        options = self.stream_options
        asks = options is not None and (options.include_usage or options.continuous_usage_stats)
        if asks and not self.stream:
            raise errors.RequestError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        if self.best_of not in (None, 1, self.n):
            raise errors.RequestError(
                f"best_of={self.best_of} is not supported; leave it out or equal to n",
                param="best_of",
            )
        if self.rid is not None:
            check_rid(self.rid)
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
        # No token (0) is a matter of the server alone; the other options are checked all the same.
        options["max_new_tokens"] = default_max_tokens if wanted in (None, 0) else wanted
        count = self.num_top_logprobs()
        if count is not None:
            options |= {"return_logprob": True, "top_logprobs": count}
        try:
            return sampling_from(options)
        except errors.RequestError as error:
            raise renamed(error, self.field_names()) from error


class ChatRequest(OpenAIRequest, TemplateFields):
    foreign: ClassVar = fields.CHAT
    messages: Messages
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None

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
        refuse_tool_use(self.tools, self.tool_choice)
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
    foreign: ClassVar = fields.OPENAI
    meant_when_empty: ClassVar = OpenAIRequest.meant_when_empty | {"prompt"}
    prompt: Any = None
    suffix: StrictStr | None = None
    add_special_tokens: StrictBool | None = None
    echo: StrictBool | None = None

    @pydantic.model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.num_top_logprobs() is not None:  # 0 asks for the chosen ones
            raise errors.RequestError(
                "echo with logprobs is not supported: a diffusion model has no chain-rule "
                "likelihood of the prompt; leave one of them out",
                param="echo",
            )
        return self

    def num_top_logprobs(self) -> int | None:
        if self.logprobs is None or self.logprobs is False:
            return None
        most = MAX_COMPLETION_LOGPROBS
        return value_checks.check_integer(self.logprobs, "logprobs", low=0, high=most)

    def field_names(self) -> dict[str, str]:
        return super().field_names() | {"input_ids": "prompt"}


class GenerateRequest(RequestModel):
    foreign: ClassVar = fields.GENERATE
    places: ClassVar = hints.BESIDE_SAMPLING_PARAMS
    meant_when_empty: ClassVar = frozenset({"text", "input_ids"})
    text: Any = None
    input_ids: Any = None
    add_special_tokens: StrictBool | None = None
    sampling_params: Any = None
    stream: StrictBool | None = None
    rid: Any = None
    priority: Integer | None = None
    return_logprob: StrictBool | None = None
    top_logprobs_num: Integer | None = None
    return_text_in_logprobs: StrictBool | None = None
    return_step_map: StrictBool | None = None
    logprob_start_len: Integer | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_likelihoods(self) -> GenerateRequest:
        """Refuses what SGLang's `select` sends, and says why no such answer would be right."""
        if self.logprob_start_len not in (None, -1):
            raise no_likelihood("logprob_start_len")
        return self

    @pydantic.model_validator(mode="after")
    def _check_top_logprobs(self) -> GenerateRequest:
        """Checks the range here, where the field has this name."""
        if self.top_logprobs_num is not None:
            most = sampling_params.MAX_TOP_LOGPROBS
            value_checks.check_integer(self.top_logprobs_num, "top_logprobs_num", low=0, high=most)
        return self


class AbortRequest(RequestModel):
    rid: StrictStr | None = None
    abort_all: StrictBool | None = None


class TokenizeRequest(TemplateFields):
    """Text or a conversation. Tools are listed in the prompt unless `tool_choice` is "none"."""

    foreign: ClassVar = fields.TOKENIZE
    meant_when_empty: ClassVar = frozenset({"prompt", "messages"})
    model: StrictStr | None = None
    prompt: Any = None
    messages: Messages | None = None
    return_token_strs: StrictBool | None = None

    @property
    def listed_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template writes into the prompt."""
        return None if self.tool_choice == "none" else self.tools

    @pydantic.model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if self.messages == []:
            raise errors.RequestError("messages must not be empty", param="messages")
        if self.messages is None:
            names = ("tools", "continue_final_message", "chat_template_kwargs")
            for name in (*names, "escape_special_tokens"):
                if getattr(self, name):
                    raise errors.RequestError(f"{name} needs messages", param=name)
        return self


class DetokenizeRequest(RequestModel):
    meant_when_empty: ClassVar = frozenset({"tokens"})
    model: StrictStr | None = None
    tokens: Any = None
    skip_special_tokens: StrictBool | None = None


Body = TypeVar("Body", bound=RequestModel)


async def read(request: requests.Request, model: type[Body]) -> Body:
    """Returns the parsed body of `request`, or raises a `RequestError` naming the field."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise errors.RequestError(
            f"Content-Type must be application/json, got {errors.quote(content_type or 'none')}"
        )
    body = await request.body()
    return await offload.off_loop(len(body) // BYTES_PER_CHARACTER_OF_WORK, parse, body, model)


def parse(body: bytes, model: type[Body]) -> Body:
    """Returns a body as a checked `model`, or raises a `RequestError` naming the field."""
    body_limits.check(body)
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise errors.RequestError(f"the body must be an object, got {type(content).__name__}")
    try:
        return field_at_fault.naming(model.model_validate, content)
    except pydantic.ValidationError as error:
        raise first_problem(error) from error


def part(model: type[Body], content: Any, name: str) -> Body:
    """Returns a part of a body as `model`; errors name the field below `name`."""
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        problem = first_problem(error)
        param = name if problem.param is None else f"{name}.{problem.param}"
        raise errors.RequestError(f"{name}: {problem}", param=param, code=problem.code) from error


def sampling_from(options: dict[str, Any]) -> sampling_params.SamplingParams:
    """Returns checked options from JSON; a container of the wrong type is a 400, too."""
    for name, kinds in (("stop", (str, list)), ("stop_token_ids", (list,)), ("dllm", (dict,))):
        value = options.get(name)
        if not (value is None or neutral_values.is_empty(value) or isinstance(value, kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise errors.RequestError(
                f"{name} must be a {wanted}, got {errors.quote(value)}", param=name
            )
    return field_at_fault.naming(sampling_params.SamplingParams.from_mapping, options)


def renamed(error: errors.RequestError, names: Mapping[str, str]) -> errors.RequestError:
    """Returns `error` with the names that its fields have in the request's body."""
    if error.param is None:
        return error
    message = str(error)
    for limit in ("max_new_tokens", "min_new_tokens"):
        message = message.replace(limit, names.get(limit, limit))
    # Only where a value follows: "the prompt has 9 tokens" is about no field.
    message = message.replace(f"{error.param}=", f"{names.get(error.param, error.param)}=")
    return type(error)(message, param=names.get(error.param, error.param), code=error.code)


def no_likelihood(param: str) -> errors.RequestError:
    """Returns the error for a field that asks for log-probabilities of a prompt."""
    return errors.RequestError(
        "a diffusion model has no chain-rule likelihood of a prompt, so prompts are not scored "
        "here and `select` of SGLang's language cannot choose; only new tokens have "
        "log-probabilities",
        param=param,
    )


def check_rid(rid: str) -> None:
    """Raises a `RequestError` for an id that is empty or too long: every choice has a copy."""
    if not 1 <= len(rid) <= MAX_RID_CHARACTERS:
        raise errors.RequestError(
            f"rid must have 1 to {MAX_RID_CHARACTERS} characters, got {len(rid)}", param="rid"
        )


def token_ids(value: Any) -> list[int] | None:
    """Returns a list of integers, written as 8.0, too; None for anything else, and for []."""
    if not isinstance(value, list):
        return None
    kinds = set(map(type, value))
    if float in kinds:
        value = [value_checks.whole(one) for one in value]
        kinds = set(map(type, value))
    return value if kinds == {int} else None


def rows_of_ids(value: Any) -> list[list[int]] | None:
    """Returns a list of lists of integers; None for anything else, and for []."""
    rows = [token_ids(one) for one in value] if isinstance(value, list) else []
    found = [one for one in rows if one is not None]
    return found if found and len(found) == len(rows) else None
