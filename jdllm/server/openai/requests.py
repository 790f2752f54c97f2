"""Bodies of OpenAI's text routes: chat and completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import StrictBool, StrictFloat, StrictStr

from jdllm import errors, value_checks
from jdllm.algorithms import lookup
from jdllm.foreign import fields
from jdllm.options import logit_options, sampling_params, stop_options
from jdllm.server.edge import bodies
from jdllm.server.edge.request_model import Integer, RequestModel
from jdllm.server.openai.conversation_fields import Messages, TemplateFields, refuse_tool_use

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


AllowedTokenIds = Annotated[
    list[Integer], pydantic.Field(max_length=logit_options.MAX_ALLOWED_IDS, fail_fast=True)
]

StopTokenIds = Annotated[
    list[Integer], pydantic.Field(max_length=stop_options.MAX_TOKEN_IDS, fail_fast=True)
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
                f"best_of={errors.quote(self.best_of)} is not supported; leave it out or equal "
                "to n",
                param="best_of",
            )
        if self.rid is not None:
            bodies.check_rid(self.rid)
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
            return bodies.sampling_from(options)
        except errors.RequestError as error:
            raise bodies.renamed(error, self.field_names()) from error


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
