"""What a message of a replayed conversation may carry: the one rule for all routes and offline.

Clients send back what a server answered, with everything that came beside the text.

- Hints (`HINTS`) say nothing to a model: they pass with any value. A template gets those that it
  reads.
- Reasoning (`REASONING`) of an assistant's turn goes to a template that reads it. Others drop it:
  by convention, templates leave out the reasoning of earlier turns.
- An assistant's turn without content has the content "".
- `REFUSED` would change the answer: only an empty value passes, as under any other name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.foreign import neutral_values

# Names that servers and SDKs give to what they keep beside the text.
HINTS = frozenset(
    {
        "annotations", "cache_control", "citations", "created_at", "encrypted_content",
        "finish_reason", "id", "index", "internal_metrics", "logprobs", "metadata", "model",
        "parsed", "phase", "prompt_cache_breakpoint", "provider", "provider_metadata",
        "provider_options", "provider_specific_fields", "reasoning_details", "reasoning_items",
        "response_metadata", "signature", "status", "stop_reason", "thinking_blocks", "timestamp",
        "usage", "usage_metadata",
    }
)  # fmt: skip
REASONING = ("reasoning_content", "thinking", "reasoning")
_PART = frozenset({"type", "text"})
# Parts of an assistant's content that hold reasoning.
_REASONING_PARTS = ("thinking", "reasoning", "redacted_thinking")
REFUSED: neutral_values.Defaults = dict.fromkeys(
    ("audio", "function_call", "images", "refusal"), ()
)


def is_empty(value: Any) -> bool:
    """Says whether a field with this value is the same as no field."""
    return value is None or neutral_values.is_empty(value)


def check_reasoning(fields: Mapping[str, Any]) -> None:
    """Raises for reasoning that is no text."""
    for name in REASONING:
        value = fields.get(name)
        if not is_empty(value) and not isinstance(value, str):
            raise errors.RequestError(
                f"{name} must be a string, got {errors.quote(value)}", param=name
            )


def content_text(content: Any, role: str) -> str:
    """Returns the text of a message; its parts are joined by a space, as in SGLang."""
    if isinstance(content, str):
        return content
    is_assistant = role == "assistant"
    if is_assistant and content in (None, []):
        return ""
    if not isinstance(content, list) or not content:
        raise errors.RequestError(
            "content must be a string or a non-empty list of text parts", param="content"
        )
    texts = (
        _part_text(part, i, role)
        for i, part in enumerate(content)
        if not (is_assistant and _kind(part) in _REASONING_PARTS)
    )
    return " ".join(texts)


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else type(part).__name__


def _part_text(part: Any, index: int, role: str) -> str:
    param = f"content.{index}"
    if _kind(part) != "text":
        raise errors.RequestError(
            f"content part {errors.quote(_kind(part))} is not supported; use text parts",
            param=param,
        )
    if not isinstance(part.get("text"), str):
        raise errors.RequestError(
            f"text must be a string, got {errors.quote(part.get('text'))}", param=f"{param}.text"
        )
    rest = {name: value for name, value in part.items() if name not in HINTS | _PART}
    if rest.get("role") == role:  # some clients repeat it
        del rest["role"]
    try:
        neutral_values.check(rest, {}, _PART)
    except errors.RequestError as error:
        raise errors.RequestError(str(error), param=f"{param}.{error.param}") from error
    return part["text"]
