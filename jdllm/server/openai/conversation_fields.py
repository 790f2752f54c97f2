"""The fields of a conversation: its messages, and how they become a prompt."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import StrictBool, StrictStr

from jdllm import errors
from jdllm.server.edge.request_model import RequestModel
from jdllm.templates import message_fields

MAX_MESSAGES = 8192


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Message(RequestModel):
    """A message of a conversation; `templates.conversations` says what becomes of its fields."""

    foreign: ClassVar = message_fields.REFUSED
    hints: ClassVar = message_fields.HINTS
    meant_when_empty: ClassVar = frozenset({"content"})
    role: StrictStr
    content: Any = None
    name: StrictStr | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Message:
        if self.role not in ROLES:
            raise errors.RequestError(
                f"role={errors.quote(self.role)} must be one of {', '.join(ROLES)}", param="role"
            )
        if self.content is not None or not self.tool_calls:
            self.content = message_fields.content_text(self.content, self.role)
        message_fields.check_reasoning(self.__dict__)
        return self

    def turn(self) -> dict[str, Any]:
        """Returns the fields that say something, as a chat template takes them."""
        extra = (self.model_extra or {}).items()
        fields = self.__dict__ | {k: value for k, value in extra if k in self.hints}
        given = {k: value for k, value in fields.items() if not message_fields.is_empty(value)}
        return given | {"content": self.content or ""}


Messages = Annotated[list[Message], pydantic.Field(max_length=MAX_MESSAGES, fail_fast=True)]


class TemplateFields(RequestModel):
    """How a conversation becomes a prompt."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    add_special_tokens: StrictBool | None = None
    escape_special_tokens: StrictBool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    @pydantic.model_validator(mode="after")
    def _check_layout(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise errors.RequestError(
                "continue_final_message and add_generation_prompt exclude one another",
                param="continue_final_message",
            )
        return self

    @property
    def writes_generation_prompt(self) -> bool:
        """Whether a header for the assistant's answer follows the conversation."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def refuse_tool_use(tools: list[dict[str, Any]] | None, tool_choice: Any) -> None:
    """Raises if an answer could have to call tools; with "none" they are not listed, as in SGLang.

    To find calls in the output is beyond this engine.
    """
    # Without tools there is nothing to choose from, and "auto" is the default.
    if tool_choice not in (None, "none", "auto", "", {}, []):
        raise errors.RequestError(
            f"tool_choice={errors.quote(tool_choice)} is not supported by this engine; "
            'leave it out or give "none"',
            param="tool_choice",
        )
    if tools and tool_choice != "none":
        raise errors.RequestError(
            'tools are not supported by this engine, except with tool_choice="none"',
            param="tools",
        )
