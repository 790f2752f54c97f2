"""Conversations that began elsewhere, brought into a form that a chat template can write.

Templates differ in what they know. What the template knows, it gets as it is. What it does not
know becomes plain text in the conversation, so that nothing of the history is lost:

- role `developer`: role `system`;
- `name` of a message: `NAME: ` before its content;
- `tool_calls` of the assistant: a line `Tool call: {"id": ..., "name": ..., "arguments": ...}` for
  each, after the content;
- role `tool` (formerly `function`): a message of the user, `Tool result (NAME, ID):` and the
  content on the next line.

`message_fields` says which other fields of a message pass; the rest is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdllm import errors, value_checks
from jdllm.foreign import neutral_values
from jdllm.templates import message_fields

if TYPE_CHECKING:
    from jdllm.templates import chat

_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


def for_template(
    messages: Sequence[Mapping[str, Any]], abilities: chat.Abilities
) -> list[dict[str, Any]]:
    """Returns the messages as the template can write them; raises `RequestError` for bad ones."""
    turns = []
    for i, message in enumerate(messages):
        try:
            turns.append(_turn(message, abilities))
        except RecursionError as error:
            raise errors.RequestError(
                "the message is nested too deeply", param=f"messages.{i}"
            ) from error
        except errors.RequestError as error:
            param = f"messages.{i}" + (f".{error.param}" if error.param else "")
            raise errors.RequestError(str(error), param=param) from error
    return turns


def _turn(message: Mapping[str, Any], abilities: chat.Abilities) -> dict[str, Any]:
    turn = _readable(_checked(message), abilities.words)
    if turn["role"] == "developer" and "developer" not in abilities.words:
        turn["role"] = "system"
    if turn["role"] in ("tool", "function"):
        knows = abilities.tool_role and turn["role"] == "tool"
        return turn if knows else _tool_result(turn)
    calls = turn.get("tool_calls")
    if calls is not None:
        if abilities.arguments is None:
            lines = [f"Tool call: {_call_text(call)}" for call in turn.pop("tool_calls")]
            turn["content"] = "\n".join([turn["content"], *lines] if turn["content"] else lines)
        else:
            turn["tool_calls"] = [_as_template_reads(call, abilities.arguments) for call in calls]
    if "name" in turn and not abilities.name:
        turn["content"] = f"{turn.pop('name')}: {turn['content']}"
    return turn


def _readable(turn: dict[str, Any], words: frozenset[str]) -> dict[str, Any]:
    """Returns the fields that the template reads; raises for others that say something."""
    reasoning = message_fields.REASONING if turn["role"] == "assistant" else ()
    read = {*_KNOWN, *words}
    if not words.isdisjoint(reasoning):
        read.update(reasoning)  # the template gets it under all of these names
    dropped = message_fields.HINTS.union(reasoning)
    rest = {name: value for name, value in turn.items() if name not in read | dropped}
    for name in message_fields.REASONING:
        if name in rest:
            raise errors.RequestError(f"only messages of the assistant have {name}", param=name)
    neutral_values.check(rest, message_fields.REFUSED, _KNOWN.union(reasoning))
    return {name: value for name, value in turn.items() if name in read}


def _checked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a message that are not empty, with text as its content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise errors.RequestError("a message needs a role")
    turn = {k: value for k, value in message.items() if not message_fields.is_empty(value)}
    calls = turn.get("tool_calls")
    if calls is not None:
        if turn["role"] != "assistant":
            raise errors.RequestError(
                "only messages of the assistant have tool_calls", param="tool_calls"
            )
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            raise errors.RequestError(
                "a tool call needs a function with a name and arguments", param="tool_calls"
            )
    content = message_fields.content_text(message.get("content"), turn["role"])
    value_checks.check_unicode(content, "content")
    message_fields.check_reasoning(turn)
    for field in ("name", "tool_call_id"):
        if not isinstance(turn.get(field, ""), str):
            raise errors.RequestError(f"{field} must be a string", param=field)
    if "tool_call_id" in turn and turn["role"] != "tool":
        raise errors.RequestError("only messages of tools have it", param="tool_call_id")
    return turn | {"content": content}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), str | Mapping)
    )


def _tool_result(turn: Mapping[str, Any]) -> dict[str, Any]:
    labels = [str(turn[field]) for field in ("name", "tool_call_id") if field in turn]
    of = f" ({', '.join(labels)})" if labels else ""
    return {"role": "user", "content": f"Tool result{of}:\n{turn['content']}"}


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    shown = {"id": call.get("id"), "name": function["name"], "arguments": _arguments(function)}
    return json.dumps({k: v for k, v in shown.items() if v is not None}, ensure_ascii=False)


def _as_template_reads(
    call: Mapping[str, Any], kind: type[dict[str, Any]] | type[str]
) -> dict[str, Any]:
    """Returns a call whose arguments are an object or JSON text, as the template writes them."""
    arguments = _arguments(call["function"])
    if kind is str and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _arguments(function: Mapping[str, Any]) -> Any:
    """Returns the arguments as an object; text that is no JSON object stays text."""
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (json.JSONDecodeError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
