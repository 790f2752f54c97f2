"""The bodies of Ollama's routes, brought into this server's own terms.

What only says how a model is loaded asks nothing of a server that has loaded its model, so any
value of the right type passes. What would change the text is honoured or refused by name.
"""

from __future__ import annotations

from typing import Any, ClassVar

import orjson
import pydantic
from pydantic import StrictBool, StrictFloat, StrictStr

from jdllm import errors, value_checks
from jdllm.algorithms import lookup
from jdllm.foreign import fields, neutral_values
from jdllm.options import sampling_params
from jdllm.server.edge import bodies, request_model
from jdllm.server.openai import conversation_fields
from jdllm.templates import message_fields

# Options that change the text, and their names in `SamplingParams`, which obeys or refuses them.
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_new_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "dllm": "dllm",
}
FIELD_NAMES = {ours: theirs for theirs, ours in SAMPLING.items()}
# Options that say how a model is loaded, or what to do when the context is full: this server
# refuses a request that is too long, whatever these are.
NUMBER_HINTS = frozenset(
    {"main_gpu", "num_batch", "num_ctx", "num_gpu", "num_gqa", "num_keep", "num_thread"}
)
FLAG_HINTS = frozenset({"f16_kv", "low_vram", "numa", "use_mlock", "use_mmap"})
OPTIONS = (*SAMPLING, *NUMBER_HINTS, *FLAG_HINTS)
NEUTRAL_OPTIONS: fields.Neutral = {
    "embedding_only": (),
    "logits_all": (),
    "mirostat": (0,),
    "penalize_newline": (True,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "vocab_only": (),
}
KNOWN = frozenset({*SAMPLING, *NUMBER_HINTS, *FLAG_HINTS, "repeat_last_n"})
# Options of samplers that NEUTRAL_OPTIONS keeps switched off.
MOOT = frozenset({"mirostat_eta", "mirostat_tau"})
# Until the model stops, and until the context is full: here the same, as no context is shifted. A
# number of tokens for which the context has no room asks for as many as it has.
_NO_LIMIT = (-1, -2)

FOREIGN: fields.Neutral = {
    **dict.fromkeys(("format", "images", "logprobs", "shift", "template", "think", "truncate"), ()),
    "top_logprobs": (0,),
}


class Request(request_model.RequestModel):
    """What /api/chat and /api/generate share."""

    foreign: ClassVar = FOREIGN
    places: ClassVar = {"options.{}": OPTIONS, **lookup.places("options.dllm.{}")}
    model: request_model.ModelName | None = None
    stream: StrictBool | None = None
    options: dict[str, Any] | None = None
    keep_alive: StrictStr | request_model.Integer | StrictFloat | None = None
    add_special_tokens: StrictBool | None = None
    escape_special_tokens: StrictBool | None = None

    def model_name(self) -> str | None:
        """Returns the name of the model without the tag that stands for no tag."""
        return None if self.model is None else self.model.removesuffix(":latest")

    def sampling(self, default_max_tokens: int) -> sampling_params.SamplingParams:
        """Returns the checked options; errors use Ollama's names."""
        try:
            return bodies.sampling_from(self._sampling_options(default_max_tokens))
        except errors.RequestError as error:
            raise bodies.renamed(error, FIELD_NAMES) from error

    def _sampling_options(self, default_max_tokens: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        foreign: dict[str, Any] = {}
        for name, value in (self.options or {}).items():
            if value is None or name in MOOT:
                continue
            if neutral_values.is_empty(value) and name in KNOWN:
                continue
            if name in SAMPLING:
                options[SAMPLING[name]] = value
            elif name in NUMBER_HINTS or name in FLAG_HINTS:
                _check_hint(name, value)
            elif name == "repeat_last_n":
                self._check_window(value)
            else:
                foreign[name] = value
        fields.check(foreign, NEUTRAL_OPTIONS, KNOWN, lookup.places("dllm.{}"))
        wanted = value_checks.whole(options.get("max_new_tokens"))
        if wanted in (None, *_NO_LIMIT) or (type(wanted) is int and wanted > default_max_tokens):
            options["max_new_tokens"] = default_max_tokens
        if options.get("seed") == -1:  # a seed of Ollama's own choice
            del options["seed"]
        return options

    def _check_window(self, window: Any) -> None:
        """Refuses a window of the repetition penalty, unless there is no such penalty."""
        _check_hint("repeat_last_n", window)
        penalty = (self.options or {}).get("repeat_penalty")
        is_none = penalty is None or neutral_values.is_empty(penalty) or penalty == 1
        if not is_none and window != -1:
            raise errors.RequestError(
                f"repeat_last_n={errors.quote(window)} is not supported; the penalty counts the "
                "whole context, which is -1",
                param="repeat_last_n",
            )


class ChatRequest(Request):
    foreign: ClassVar = FOREIGN | {"tools": ()}
    messages: list[dict[str, Any]] | None = None
    _chat_messages: list[conversation_fields.Message] = pydantic.PrivateAttr()

    @property
    def chat_messages(self) -> list[conversation_fields.Message]:
        """The conversation in the form of the OpenAI route."""
        return self._chat_messages

    @pydantic.model_validator(mode="after")
    def _read_messages(self) -> ChatRequest:
        messages = self.messages or []
        if len(messages) > conversation_fields.MAX_MESSAGES:
            raise errors.RequestError(
                f"{len(messages)} messages; at most {conversation_fields.MAX_MESSAGES} are allowed",
                param="messages",
            )
        named = [(f"messages.{i}", message) for i, message in enumerate(messages)]
        self._chat_messages = [
            bodies.part(conversation_fields.Message, chat_turn(message, name), name)
            for name, message in named
        ]
        return self


class GenerateRequest(Request):
    foreign: ClassVar = FOREIGN | {
        "context": (),
        "height": (0,),
        "steps": (0,),
        "width": (0,),
    }
    prompt: StrictStr | None = None
    suffix: StrictStr | None = None
    system: StrictStr | None = None
    raw: StrictBool | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> GenerateRequest:
        if self.system and (self.raw or self.suffix):
            raise errors.RequestError(
                "system is part of a conversation; raw and suffix have none", param="system"
            )
        if self.escape_special_tokens and self.is_plain:
            raise errors.RequestError(
                "escape_special_tokens is for conversations; raw and suffix have none",
                param="escape_special_tokens",
            )
        return self

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is the text itself, not a question in a conversation."""
        return bool(self.raw or self.suffix)

    @property
    def chat_messages(self) -> list[conversation_fields.Message]:
        """The conversation that a prompt stands for."""
        turns = [("system", self.system)] if self.system else []
        turns.append(("user", self.prompt or ""))
        return [
            bodies.part(conversation_fields.Message, {"role": role, "content": content}, "prompt")
            for role, content in turns
        ]


class ShowRequest(request_model.RequestModel):
    model: request_model.ModelName | None = None
    name: request_model.ModelName | None = None
    verbose: StrictBool | None = None


class _Message(request_model.RequestModel):
    foreign: ClassVar = message_fields.REFUSED
    hints: ClassVar = message_fields.HINTS
    role: StrictStr
    content: StrictStr | None = None
    thinking: StrictStr | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    tool_name: StrictStr | None = None


class _ToolCall(request_model.RequestModel):
    id: StrictStr | None = None
    type: StrictStr | None = None
    function: _Function


class _Function(request_model.RequestModel):
    index: request_model.Integer | None = None
    name: StrictStr
    description: StrictStr | None = None
    arguments: dict[str, Any]


_Message.model_rebuild()


def chat_turn(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a message in OpenAI's form; calls of tools have their arguments as JSON there."""
    message = bodies.part(_Message, content, name)
    turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking is not None:
        turn["thinking"] = message.thinking
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id or f"call_{i}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": orjson.dumps(call.function.arguments).decode(),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_name is not None:
        turn["name"] = message.tool_name
    return turn


def _check_hint(name: str, value: Any) -> None:
    if name in FLAG_HINTS:
        value_checks.check_flag(value, name)
    else:
        value_checks.check_integer(value, name, low=-value_checks.LARGEST_INTEGER)
