"""Ollama's answers: one object, or a line of JSON for each part of the text.

Durations are in nanoseconds. `eval_duration` is the whole time that a request ran: the first
denoising steps of a row share launches with other rows' prompts, so `prompt_eval_duration` has no
value of its own and is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Literal

from jdllm.server import sse
from jdllm.server.edge import responses
from jdllm.server.ollama import plain_errors

if TYPE_CHECKING:
    from jdllm.engine import generations

NANOSECONDS = 1_000_000_000
Kind = Literal["chat", "generate"]


def _error_line(error: Exception) -> bytes:
    _, body, _ = responses.describe(error)
    return line(plain_errors.plain(body))


def line(content: dict[str, Any]) -> bytes:
    """Returns one line of a stream."""
    return responses.json_bytes(content) + b"\n"


# A silence is filled with a space, which is white space before the next line's JSON: Ollama's
# client reads every whole line as JSON, also an empty one.
FRAMING = sse.Framing(media_type=b"application/x-ndjson", ping=b" ", error=_error_line, end=b"")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How an answer is written: `kind` says where its text stands, `model` whose answer it is."""

    kind: Kind
    model: str

    async def lines(
        self, events: AsyncGenerator[generations.Generation, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yields the lines of a stream; the last one has the statistics and no text."""
        async with contextlib.aclosing(events):
            async for generation in events:
                if generation.delta_text:
                    yield line(self._content(generation.delta_text) | {"done": False})
                if generation.finish_reason is not None:
                    yield line(self._content("") | _ending(generation))

    def whole(self, generation: generations.Generation) -> dict[str, Any]:
        """Returns the answer as one object."""
        return self._content(generation.text) | _ending(generation)

    def loaded(self) -> dict[str, Any]:
        """Returns the answer to a request without a prompt, which asks to load the model."""
        return self._content("") | {"done": True, "done_reason": "load"}

    def _content(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        content = {"message": message} if self.kind == "chat" else {"response": text}
        return {"model": self.model, "created_at": timestamp(), **content}


def timestamp(seconds: float | None = None) -> str:
    """Returns a time (Unix seconds; None: now) as Ollama writes it: RFC 3339 in UTC."""
    utc = datetime.UTC
    time = datetime.datetime.now(utc)
    if seconds is not None:
        time = datetime.datetime.fromtimestamp(seconds, utc)
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ending(generation: generations.Generation) -> dict[str, Any]:
    meta, reason = generation.meta_info, generation.finish_reason
    assert reason is not None, "only an ended generation has an ending"
    total_s = meta["e2e_latency"]
    ending = {
        "done": True,
        "done_reason": reason["type"],
        "total_duration": int(total_s * NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": meta["prompt_tokens"],
        "eval_count": meta["completion_tokens"],
        # Clients divide by it.
        "eval_duration": max(1, int((total_s - meta["queue_time"]) * NANOSECONDS)),
        "dllm": meta["dllm"],
    }
    if reason["type"] == "abort":
        ending["error"] = str(reason["message"])
    return ending
