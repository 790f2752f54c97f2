"""The answer to a response request: one object, or the events that build it up.

An answer has one output item, the message, with one part, its text. Every object that a stream
shows on the way is made by the same functions as the final one, so the two cannot differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any, Literal

from jdllm.server import running, sse, state
from jdllm.server.edge import responses
from jdllm.server.openai import answer
from jdllm.server.openai.responses.request import ResponseRequest

if TYPE_CHECKING:
    from jdllm.engine import generations

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Event = dict[str, Any]


def new_id(prefix: str) -> str:
    """Returns a new id in OpenAI's form; clients tell answers and messages apart by its start."""
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclasses.dataclass(slots=True, kw_only=True)
class Answer:
    """One answer; counts the events that it has sent."""

    server: state.ServerState
    body: ResponseRequest
    prompt_list: running.PromptList
    answer_id: str
    message_id: str = dataclasses.field(default_factory=lambda: new_id("msg"))
    created_s: int = dataclasses.field(default_factory=lambda: int(time.time()))
    num_events: int = 0

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream, the first of them once the engine has taken the prompt."""
        is_first = True
        async with contextlib.aclosing(running.stream(self.server, self.prompt_list)) as events:
            async for generation in events:
                for event in self._events(generation, is_first):
                    yield self._frame(event)
                is_first = False

    def framing(self) -> sse.Framing:
        """Returns how OpenAI writes these streams: no `[DONE]`, and a fault is an event, too."""
        return sse.Framing(error=self._failure, end=b"")

    def response(self, generation: generations.Generation) -> dict[str, Any]:
        """Returns the finished answer."""
        status = _status(generation)
        content = self._response(status)
        content["completed_at"] = int(time.time()) if status == "completed" else None
        content["output"] = [self._message(status, generation.text)]
        content["usage"] = _usage(generation)
        if status == "incomplete":
            content["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "failed":
            reason = generation.finish_reason or {}
            content["error"] = _error(str(reason.get("message", "aborted")))
        return content

    def _events(self, generation: generations.Generation, is_first: bool) -> Iterator[Event]:
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        if is_first:
            yield {"type": "response.created", "response": self._response("in_progress")}
            yield {"type": "response.in_progress", "response": self._response("in_progress")}
            item = self._message("in_progress", None)
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            yield {"type": "response.content_part.added", **place, "part": _part("")}
        if generation.delta_text:
            delta = {"delta": generation.delta_text, "logprobs": []}
            yield {"type": "response.output_text.delta", **place, **delta}
        if generation.finish_reason is None:
            return
        text, status = generation.text, _status(generation)
        yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": _part(text)}
        item = self._message(status, text)
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        yield {"type": f"response.{status}", "response": self.response(generation)}

    def _frame(self, event: Event) -> bytes:
        content = event | {"sequence_number": self.num_events}
        self.num_events += 1
        return f"event: {event['type']}\n".encode() + sse.frame(content)

    def _failure(self, error: Exception) -> bytes:
        """Returns the last event of a stream that a fault has ended."""
        _, body, _ = responses.describe(error)
        content = self._response("failed") | {"error": _error(body["error"]["message"])}
        return self._frame({"type": "response.failed", "response": content})

    def _message(self, status: Status, text: str | None) -> dict[str, Any]:
        """Returns the output item; `text` is None as long as it has no part."""
        return {
            "id": self.message_id,
            "type": "message",
            # An item knows no "failed": it is whole, or it is not.
            "status": "incomplete" if status == "failed" else status,
            "role": "assistant",
            "content": [] if text is None else [_part(text)],
        }

    def _response(self, status: Status) -> dict[str, Any]:
        """Returns the answer without any output; options are shown as the client gave them."""
        body = self.body
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.server.engine.model_name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


def _status(generation: generations.Generation) -> Status:
    """Returns how an ended generation ended, in OpenAI's words."""
    assert generation.finish_reason is not None, "only ended generations have a final status"
    match generation.finish_reason["type"]:
        case "stop":
            return "completed"
        case "length":
            return "incomplete"
        case _:
            return "failed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _error(message: str) -> dict[str, str]:
    return {"code": "server_error", "message": message}


def _usage(generation: generations.Generation) -> dict[str, Any]:
    """Returns the counts of the chat route under the names of this one."""
    counts = answer.usage([generation])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        # `cache_write_tokens` are tokens that cost more; none do.
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        "dllm": counts["dllm"],
    }
