"""The body of POST /v1/responses.

The server stores nothing, so what needs an earlier answer is refused by name. `store` itself is
not: clients leave it at its default of true, and the answer says `"store": false`, as in vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import StrictBool, StrictStr

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.foreign import fields
from jdllm.options import sampling_params
from jdllm.server.edge import bodies, request_model
from jdllm.server.openai import conversation_fields
from jdllm.server.openai.responses import items

# Options that `SamplingParams` obeys or refuses under the same name. OpenAI's own are
# temperature and top_p; the others stand beside them, as in vLLM.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "dllm",
)
# Additions to an answer about things that no answer of this server has.
EMPTY_ADDITIONS = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
FOREIGN: fields.Neutral = {
    **fields.COMMON,
    **dict.fromkeys(
        (
            "access_programs", "background_options", "context_management", "conversation",
            "enable_response_messages", "image", "moderation", "previous_input_messages",
            "previous_response_id", "prompt", "prompt_cache_options",
        ),
        (),
    ),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}  # fmt: skip


class _StreamOptions(request_model.RequestModel):
    foreign: ClassVar = fields.STREAM_OPTIONS
    include_usage: StrictBool | None = None  # of the chat route; here the last event always does


class _Reasoning(request_model.RequestModel):
    foreign: ClassVar = {"effort": ("none",), "summary": (), "generate_summary": ()}


class _TextOptions(request_model.RequestModel):
    foreign: ClassVar = {"format": ({"type": "text"},), "verbosity": ("medium",)}


# OpenAI's limits. Three events of a stream repeat it.
Metadata = Annotated[
    dict[
        Annotated[StrictStr, pydantic.Field(max_length=64)],
        Annotated[StrictStr, pydantic.Field(max_length=512)],
    ],
    pydantic.Field(max_length=16),
]


class ResponseRequest(request_model.RequestModel):
    """What a client asks for; `messages` is what `input` and `instructions` say."""

    foreign: ClassVar = FOREIGN
    places: ClassVar = lookup.places("dllm.{}")
    meant_when_empty: ClassVar = frozenset({"input"})
    model: StrictStr | None = None
    input: Any = None
    instructions: StrictStr | None = None
    max_output_tokens: request_model.Integer | None = None
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    store: StrictBool | None = None
    metadata: Metadata | None = None
    include: list[StrictStr] | None = None
    text: _TextOptions | None = None
    reasoning: _Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tool_calls: request_model.Integer | None = (
        None  # no answer has a call, so every limit is kept
    )
    parallel_tool_calls: StrictBool | None = None
    user: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    escape_special_tokens: StrictBool | None = None
    rid: StrictStr | None = None
    priority: request_model.Integer | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    dllm: Any = None
    _messages: list[conversation_fields.Message] = pydantic.PrivateAttr()

    @property
    def messages(self) -> list[conversation_fields.Message]:
        """The conversation to continue, as the chat route has it."""
        return self._messages

    @pydantic.model_validator(mode="after")
    def _check(self) -> ResponseRequest:
        if self.stream_options is not None and not self.stream:
            raise errors.RequestError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise errors.RequestError(
                f"max_output_tokens={errors.quote(self.max_output_tokens)} must be at least 1",
                param="max_output_tokens",
            )
        if self.rid is not None:
            bodies.check_rid(self.rid)
        for name in self.include or ():
            if name not in EMPTY_ADDITIONS:
                raise errors.RequestError(
                    f"include: {errors.quote(name)} is not supported on this route; leave it out",
                    param="include",
                )
        conversation_fields.refuse_tool_use(self.tools, self.tool_choice)
        self._messages = items.chat_messages(self.input, self.instructions)
        return self

    def sampling(self, default_max_tokens: int) -> sampling_params.SamplingParams:
        """Returns the checked options; errors use the names of this body's fields."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        options = {name: value for name, value in given.items() if value is not None}
        wanted = self.max_output_tokens
        options["max_new_tokens"] = default_max_tokens if wanted is None else wanted
        try:
            return bodies.sampling_from(options)
        except errors.RequestError as error:
            raise bodies.renamed(error, self.field_names()) from error

    def field_names(self) -> dict[str, str]:
        """Maps the engine's names of fields, which its errors use, to this body's names."""
        return {"max_new_tokens": "max_output_tokens", "prompt": "input", "input_ids": "input"}
