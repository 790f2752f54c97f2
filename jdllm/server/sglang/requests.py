"""Bodies of SGLang's own routes."""

from __future__ import annotations

from typing import Any, ClassVar

import pydantic
from pydantic import StrictBool, StrictStr

from jdllm import errors, value_checks
from jdllm.foreign import fields
from jdllm.options import hints, sampling_params
from jdllm.server.edge import bodies
from jdllm.server.edge.request_model import Integer, RequestModel
from jdllm.server.openai.conversation_fields import Messages, TemplateFields


class GenerateRequest(RequestModel):
    foreign: ClassVar = fields.GENERATE
    places: ClassVar = hints.BESIDE_SAMPLING_PARAMS
    meant_when_empty: ClassVar = frozenset({"text", "input_ids"})
    text: Any = None
    input_ids: Any = None
    add_special_tokens: StrictBool | None = None
    sampling_params: Any = None
    stream: StrictBool | None = None
    rid: Any = None
    priority: Integer | None = None
    return_logprob: StrictBool | None = None
    top_logprobs_num: Integer | None = None
    return_text_in_logprobs: StrictBool | None = None
    return_step_map: StrictBool | None = None
    logprob_start_len: Integer | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_likelihoods(self) -> GenerateRequest:
        """Refuses what SGLang's `select` sends, and says why no such answer would be right."""
        if self.logprob_start_len not in (None, -1):
            raise bodies.no_likelihood("logprob_start_len")
        return self

    @pydantic.model_validator(mode="after")
    def _check_top_logprobs(self) -> GenerateRequest:
        """Checks the range here, where the field has this name."""
        if self.top_logprobs_num is not None:
            most = sampling_params.MAX_TOP_LOGPROBS
            value_checks.check_integer(self.top_logprobs_num, "top_logprobs_num", low=0, high=most)
        return self


class AbortRequest(RequestModel):
    rid: StrictStr | None = None
    abort_all: StrictBool | None = None


class TokenizeRequest(TemplateFields):
    """Text or a conversation. Tools are listed in the prompt unless `tool_choice` is "none"."""

    foreign: ClassVar = fields.TOKENIZE
    meant_when_empty: ClassVar = frozenset({"prompt", "messages"})
    model: StrictStr | None = None
    prompt: Any = None
    messages: Messages | None = None
    return_token_strs: StrictBool | None = None

    @property
    def listed_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template writes into the prompt."""
        return None if self.tool_choice == "none" else self.tools

    @pydantic.model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if self.messages == []:
            raise errors.RequestError("messages must not be empty", param="messages")
        if self.messages is None:
            names = ("tools", "continue_final_message", "chat_template_kwargs")
            for name in (*names, "escape_special_tokens"):
                if getattr(self, name):
                    raise errors.RequestError(f"{name} needs messages", param=name)
        return self


class DetokenizeRequest(RequestModel):
    meant_when_empty: ClassVar = frozenset({"tokens"})
    model: StrictStr | None = None
    tokens: Any = None
    skip_special_tokens: StrictBool | None = None
