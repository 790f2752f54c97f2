"""The fields of a conversation: its messages, and how they become a prompt."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import StrictBool, StrictStr

from jdllm import errors
from jdllm.server import foreign_fields
from jdllm.server.request_model import RequestModel, first_problem

MAX_MESSAGES = 8192


class TextPart(RequestModel):
    type: StrictStr
    text: StrictStr


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Message(RequestModel):
    """A message of a conversation; `templates.conversations` says what becomes of its fields."""

    foreign: ClassVar = foreign_fields.MESSAGE
    role: StrictStr
    content: Any = None
    name: StrictStr | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Message:
        if self.role not in ROLES:
            raise errors.RequestError(
                f"role={errors.quote(self.role)} must be one of {', '.join(ROLES)}", param="role"
            )
        if self.content is not None or not self.tool_calls:
            self.content = content_text(self.content)
        return self

    def turn(self) -> dict[str, Any]:
        """Returns the fields that say something, as a chat template takes them."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        given = {name: value for name, value in fields.items() if value not in (None, [], "")}
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


def content_text(content: Any) -> str:
    """Returns the text of a message; its parts are joined by a space, as in SGLang."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise errors.RequestError(
            "content must be a string or a non-empty list of text parts", param="content"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise errors.RequestError(
                f"content part {errors.quote(kind)} is not supported; use text parts",
                param=f"content.{i}",
            )
        try:
            texts.append(TextPart.model_validate(part).text)
        except pydantic.ValidationError as error:
            problem = first_problem(error)
            raise errors.RequestError(str(problem), param=f"content.{i}.{problem.param}") from error
    return " ".join(texts)
