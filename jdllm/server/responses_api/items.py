"""Turns the `input` of a response request into the messages of a conversation.

`input` is a text, or a list of items: messages of the short and of the long form, and the calls
and results of tools of an earlier exchange. What comes out has the form of the chat route, so
that both routes build the same prompt from the same conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import StrictStr

from jdllm import errors
from jdllm.server import conversation_fields, foreign_fields, protocol, request_model

ChatMessage = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text")
# Fields of items that other servers answer with, and that clients send back as they are.
_ECHOED: foreign_fields.Neutral = {"phase": ("final_answer",)}


class _Item(request_model.RequestModel):
    """What items share: how far an earlier exchange got says nothing about its text."""

    type: StrictStr | None = None
    id: StrictStr | None = None
    status: StrictStr | None = None


class _Message(_Item):
    foreign: ClassVar = _ECHOED
    role: StrictStr
    content: Any


class _FunctionCall(_Item):
    foreign: ClassVar = {"namespace": (), "caller": ()}
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr


class _FunctionCallOutput(_Item):
    foreign: ClassVar = {"namespace": (), "caller": ()}
    call_id: StrictStr
    output: Any
    name: StrictStr | None = None


class _Reasoning(_Item):
    foreign: ClassVar = {"encrypted_content": ()}
    summary: Any = None
    content: Any = None


def chat_messages(value: Any, instructions: str | None) -> list[conversation_fields.Message]:
    """Returns the checked messages of `input`, after the instructions if there are some."""
    return [
        protocol.part(conversation_fields.Message, turn, name)
        for name, turn in turns(value, instructions)
    ]


def turns(value: Any, instructions: str | None) -> list[tuple[str, ChatMessage]]:
    """Returns the turns of the conversation, each with the name of the field it comes from."""
    found: list[tuple[str, ChatMessage]] = []
    if instructions:
        found.append(("instructions", {"role": "system", "content": instructions}))
    if isinstance(value, str) and value:
        found.append(("input", {"role": "user", "content": value}))
    elif isinstance(value, list) and value:
        if len(value) > conversation_fields.MAX_MESSAGES:
            raise errors.RequestError(
                f"input has {len(value)} items; at most {conversation_fields.MAX_MESSAGES} are "
                "allowed",
                param="input",
            )
        for i, item in enumerate(value):
            _append(found, item, f"input.{i}")
    else:
        raise errors.RequestError(
            "input must be a string or a list of items, and not empty", param="input"
        )
    return found


def _append(turns: list[tuple[str, ChatMessage]], item: Any, name: str) -> None:
    """Adds what an item says to the conversation, or raises an error that names the item."""
    if not isinstance(item, dict):
        raise errors.RequestError(f"{name} must be an object", param=name)
    match item.get("type", "message"):
        case "message":
            message = protocol.part(_Message, item, name)
            content = _content(message.content, f"{name}.content")
            turns.append((name, {"role": message.role, "content": content}))
        case "function_call":
            call = protocol.part(_FunctionCall, item, name)
            _append_call(turns, call, name)
        case "function_call_output":
            result = protocol.part(_FunctionCallOutput, item, name)
            content = _content(result.output, f"{name}.output")
            turn = {"role": "tool", "tool_call_id": result.call_id, "content": content}
            turns.append((name, turn))
        case "reasoning":
            reasoning = protocol.part(_Reasoning, item, name)
            if reasoning.summary or reasoning.content:
                raise errors.RequestError(
                    f"{name}: the text of a reasoning item is not supported; leave the item out",
                    param=name,
                )
        case "item_reference":
            raise errors.RequestError(
                f"{name}: this server stores no items; send the item itself", param=name
            )
        case kind:
            raise errors.RequestError(
                f"{name}: an item of type {errors.quote(kind)} is not supported; use message, "
                "function_call and function_call_output",
                param=f"{name}.type",
            )


def _append_call(turns: list[tuple[str, ChatMessage]], call: _FunctionCall, name: str) -> None:
    """Adds a call to the assistant's turn: the text and the calls of one answer are one turn."""
    function = {"name": call.name, "arguments": call.arguments}
    entry = {"id": call.call_id, "type": "function", "function": function}
    if turns and turns[-1][1]["role"] == "assistant":
        turns[-1][1].setdefault("tool_calls", []).append(entry)
    else:
        turns.append((name, {"role": "assistant", "content": None, "tool_calls": [entry]}))


def _content(content: Any, name: str) -> Any:
    """Returns the content with its text parts in the form of the chat route."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise errors.RequestError(f"{name} must be a string or a list of parts", param=name)
    return [_part(part, f"{name}.{i}") for i, part in enumerate(content)]


def _part(part: Any, name: str) -> Mapping[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in TEXT_PARTS:
        raise errors.RequestError(
            f"{name}: a content part of type {errors.quote(kind)} is not supported; use "
            "input_text and output_text",
            param=name,
        )
    return {"type": "text", "text": protocol.part(_TextPart, part, name).text}


class _TextPart(request_model.RequestModel):
    foreign: ClassVar = {"prompt_cache_breakpoint": ()}
    type: StrictStr
    text: StrictStr
    # What stands beside an answer's own text; a prompt is made of the text alone.
    annotations: Any = None
    logprobs: Any = None
