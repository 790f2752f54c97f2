"""The chat template of a checkpoint: turns a conversation into the text of a prompt.

Server, offline API, evaluation and training all render with `ChatTemplate`, so a template means
the same everywhere, and cannot run a program anywhere (see `sandbox`). What a client sends is
data of the template, never an argument of a Python function, so no name collides with one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

from jdllm import errors
from jdllm.templates import budget, message_fields, sandbox

Messages = Sequence[Mapping[str, Any]]

MAX_SOURCE_CHARACTERS = 2**20
# Variables that only the renderer sets, and what else transformers' `apply_chat_template` takes:
# whoever sends one of these means more than a variable of the template.
RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "kwargs",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# Marks where the final message ends; its blank shows whether the template strips messages.
_END_OF_FINAL = "\N{SYMBOL FOR END OF TEXT}END-OF-FINAL-MESSAGE "
_QUESTION = {"role": "user", "content": "PROBE-QUESTION"}
_ENVIRONMENT = sandbox.Environment()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a template writes of a message beyond its content; found by rendering probes.

    `words` are the names and strings in its source. `arguments` is the type of a call's arguments
    that the template can write, None if it writes no tool calls.
    """

    words: frozenset[str]
    name: bool
    arguments: type[dict] | type[str] | None
    tool_role: bool


class ChatTemplate:
    """One compiled template; `special_tokens` are variables such as `bos_token`.

    `literals` are the texts that it can write by itself.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        if not source.strip():
            raise errors.ConfigError("the chat template is empty")
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise errors.ConfigError(
                f"the chat template has more than {MAX_SOURCE_CHARACTERS} characters"
            )
        try:
            tree = _ENVIRONMENT.parse(source)
            self._words, self.literals = frozenset(_words(tree)), frozenset(_literals(tree))
            self._template = _ENVIRONMENT.from_string(source)
        except Exception as error:  # foreign code: no list of what it may raise is complete
            raise errors.ConfigError(
                f"the chat template cannot be read: {describe(error)}"
            ) from error
        try:
            self._text([_QUESTION], {})
        except jinja2.TemplateError:
            pass  # it may well refuse this conversation, or need a variable of the request
        except Exception as error:  # foreign code, as above
            raise errors.ConfigError(
                f"the chat template fails on a plain question: {describe(error)}"
            ) from error
        self.abilities = self._probe()

    def render(
        self,
        messages: Messages,
        *,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the text of a conversation; raises a `RequestError` if the template fails.

        With `continue_final_message` the text ends where the final message ends, so that the
        model goes on writing it.
        """
        if continue_final_message and add_generation_prompt:
            raise errors.RequestError(
                "continue_final_message and add_generation_prompt exclude one another",
                param="continue_final_message",
            )
        check_variables(variables or {})
        if tools and "tools" not in self.abilities.words:
            raise errors.RequestError("the chat template does not read tools", param="tools")
        given = {**(variables or {}), "tools": tools or None}
        given["add_generation_prompt"] = add_generation_prompt
        turns = [dict(message) for message in messages]
        final = str(turns[-1].get("content") or "") if turns else ""
        if continue_final_message:
            if not final.strip():
                raise errors.RequestError(
                    "continue_final_message needs a final message with content",
                    param="continue_final_message",
                )
            turns[-1]["content"] = final + _END_OF_FINAL
        try:
            text = self._text(turns, given)
        except jinja2.TemplateError as error:
            raise errors.RequestError(
                f"the chat template refuses these messages: {describe(error)}", param="messages"
            ) from error
        except Exception as error:  # foreign code: no list of what it may raise is complete
            raise errors.RequestError(
                f"the chat template fails on these messages: {describe(error)}", param="messages"
            ) from error
        return _until_end_of(final, text) if continue_final_message else text

    def _text(self, messages: Messages, variables: Mapping[str, Any]) -> str:
        always = {"tools": None, "documents": None, "add_generation_prompt": True}
        given = {**self._special_tokens, **always, **_plain(variables)}
        given["messages"] = [_message(one) for one in messages]
        with budget.limits(given):
            # As data: `render(**given)` would fail for a variable named `self`.
            return self._template.render(given)

    def _probe(self) -> Abilities:
        words = self._words
        named = {**_QUESTION, "name": "PROBE-NAME"}
        arguments: type[dict] | type[str] | None = None
        tool_role = False
        if "tool_calls" in words:
            for kind in (dict, str):
                if self._writes([_QUESTION, _call(kind)], "PROBE-FUNCTION", "PROBE-VALUE"):
                    arguments = kind
                    break
        if "tool" in words:
            call = _call(arguments or dict)
            before = [_QUESTION, call] if arguments else [_QUESTION]
            result = {"role": "tool", "content": "PROBE-RESULT", "tool_call_id": "call00001"}
            result["name"] = "PROBE-FUNCTION"
            tool_role = self._writes([*before, result], "PROBE-RESULT")
        return Abilities(
            words=words,
            name="name" in words and self._writes([named], "PROBE-NAME"),
            arguments=arguments,
            tool_role=tool_role,
        )

    def _writes(self, messages: Messages, *texts: str) -> bool:
        try:
            text = self._text(messages, {})
        except Exception:  # foreign code: any failure says that it cannot
            return False
        return all(one in text for one in texts)


def check_variables(names: Mapping[str, Any]) -> None:
    """Raises if a request sets a variable of the template that is not its own to set."""
    for name in names:
        if name in RESERVED_VARIABLES:
            raise errors.RequestError(
                f"{name!r} is set by the server", param=f"chat_template_kwargs.{name}"
            )


def describe(error: Exception) -> str:
    """Returns one line about what a template raised."""
    if isinstance(error, RecursionError):
        text = "it calls itself without end, or the data is nested too deeply"
    else:
        text = " ".join(str(error)[:1000].split())[:200]
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {text}"
    if isinstance(error, jinja2.TemplateError | budget.LimitExceeded):
        return text
    return f"{type(error).__name__}: {text}"


def _until_end_of(final: str, text: str) -> str:
    """Returns `text` up to the mark behind the final message."""
    end = text.rfind(_END_OF_FINAL.strip())
    if end < 0 or final.strip() not in text:
        raise errors.RequestError(
            "the chat template changes the final message, so it cannot be continued",
            param="continue_final_message",
        )
    keeps_blanks = text.startswith(_END_OF_FINAL, end)
    return text[:end] if keeps_blanks else text[:end].rstrip()


def _words(tree: nodes.Node) -> Iterator[str]:
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Const)):
        if isinstance(node, nodes.Name):
            yield node.name
        elif isinstance(node, nodes.Getattr):
            yield node.attr
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            yield node.value


def _literals(tree: nodes.Node) -> Iterator[str]:
    for node in tree.find_all((nodes.TemplateData, nodes.Const)):
        if isinstance(node, nodes.TemplateData):
            yield node.data
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            yield node.value


def _call(kind: type[dict] | type[str]) -> dict[str, Any]:
    value = {"probe": "PROBE-VALUE"}
    arguments = value if kind is dict else json.dumps(value)
    function = {"name": "PROBE-FUNCTION", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a template sees of a message: no None, reasoning under its usual names."""
    plain = {name: value for name, value in _plain(message).items() if value is not None}
    reasoning = next((plain[name] for name in message_fields.REASONING if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Returns a copy that holds JSON's types only: other objects may have dangerous methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise errors.RequestError(
        f"a chat template takes JSON's types only, got {type(value).__name__}", param="messages"
    )
