"""Turns the `input` of a response request into the messages of a conversation.

`input` is a text, or a list of items: messages of the short and of the long form, and the calls
and results of tools of an earlier exchange. What comes out has the form of the chat route, so
that both routes build the same prompt from the same conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import StrictStr

from jdllm import errors
from jdllm.server.edge import bodies, request_model
from jdllm.server.openai import conversation_fields
from jdllm.templates import message_fields

ChatMessage = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text")


class _Item(request_model.RequestModel):
    """What items share: what an earlier answer says beside its text passes."""

    hints: ClassVar = message_fields.HINTS
    type: StrictStr | None = None


class _Message(_Item):
    foreign: ClassVar = message_fields.REFUSED
    role: StrictStr
    content: Any = None


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
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The reasoning itself, or its summary if there is no more."""
        parts = self.content or self.summary or []
        return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def chat_messages(value: Any, instructions: str | None) -> list[conversation_fields.Message]:
    """Returns the checked messages of `input`, after the instructions if there are some."""
    return [
        bodies.part(conversation_fields.Message, turn, name)
        for name, turn in turns(value, instructions)
    ]


def turns(value: Any, instructions: str | None) -> list[tuple[str, ChatMessage]]:
    """Returns the turns of the conversation, each with the name of the field it comes from."""
    found = _Turns()
    if instructions:
        found.add("instructions", {"role": "system", "content": instructions})
    if isinstance(value, str) and value:
        found.add("input", {"role": "user", "content": value})
    elif isinstance(value, list) and value:
        if len(value) > conversation_fields.MAX_MESSAGES:
            raise errors.RequestError(
                f"input has {len(value)} items; at most {conversation_fields.MAX_MESSAGES} are "
                "allowed",
                param="input",
            )
        for i, item in enumerate(value):
            _append(found, item, f"input.{i}")
        if not found.named:
            raise errors.RequestError(
                "input holds reasoning alone; add a message, a call or a result", param="input"
            )
    else:
        raise errors.RequestError(
            "input must be a string or a list of items, and not empty", param="input"
        )
    return found.named


@dataclasses.dataclass
class _Turns:
    """The turns so far; `reasoning` waits for the assistant's turn that it belongs to.

    Reasoning that no such turn follows is dropped: it is a hint of an answer without a text.
    """

    named: list[tuple[str, ChatMessage]] = dataclasses.field(default_factory=list)
    reasoning: str = ""

    def add(self, name: str, turn: ChatMessage) -> None:
        if turn["role"] == "assistant" and self.reasoning:
            turn["reasoning_content"] = self.reasoning
        self.reasoning = ""
        self.named.append((name, turn))

    def add_reasoning(self, text: str) -> None:
        self.reasoning = "\n".join(part for part in (self.reasoning, text) if part)

    def add_call(self, call: _FunctionCall, name: str) -> None:
        """Adds a call to the assistant's turn: the text and the calls of one answer are one turn.

        Reasoning of a turn before its call is the turn's, too.
        """
        function = {"name": call.name, "arguments": call.arguments}
        entry = {"id": call.call_id, "type": "function", "function": function}
        if not self.named or self.named[-1][1]["role"] != "assistant":
            self.add(name, {"role": "assistant", "content": None, "tool_calls": [entry]})
            return
        turn = self.named[-1][1]
        turn.setdefault("tool_calls", []).append(entry)
        if self.reasoning:
            parts = [turn["reasoning_content"]] if "reasoning_content" in turn else []
            turn["reasoning_content"] = "\n".join([*parts, self.reasoning])
            self.reasoning = ""


def _append(found: _Turns, item: Any, name: str) -> None:
    """Adds what an item says to the conversation, or raises an error that names the item."""
    if not isinstance(item, dict):
        raise errors.RequestError(f"{name} must be an object", param=name)
    match item.get("type", "message"):
        case "message":
            message = bodies.part(_Message, item, name)
            content = message.content
            if content is not None:
                content = _content(content, f"{name}.content")
            found.add(name, {"role": message.role, "content": content})
        case "function_call":
            found.add_call(bodies.part(_FunctionCall, item, name), name)
        case "function_call_output":
            result = bodies.part(_FunctionCallOutput, item, name)
            content = _content(result.output, f"{name}.output")
            found.add(name, {"role": "tool", "tool_call_id": result.call_id, "content": content})
        case "reasoning":
            found.add_reasoning(bodies.part(_Reasoning, item, name).text)
        case "item_reference":
            raise errors.RequestError(
                f"{name}: this server stores no items; send the item itself, as clients do with "
                "store: false",
                param=name,
            )
        case kind:
            raise errors.RequestError(
                f"{name}: an item of type {errors.quote(kind)} is not supported; use message, "
                "function_call and function_call_output",
                param=f"{name}.type",
            )


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
    return {"type": "text", "text": bodies.part(_TextPart, part, name).text}


class _TextPart(request_model.RequestModel):
    hints: ClassVar = message_fields.HINTS
    type: StrictStr
    text: StrictStr
