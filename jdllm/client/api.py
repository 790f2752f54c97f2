"""The routes that generate: the bodies to send, and a reader of answers, streamed or whole.

There are three kinds of routes: SGLang's POST /generate, and OpenAI's text and chat completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from jdllm.client import failures, transport

Kind = Literal["generate", "completions", "chat"]
ROUTES: dict[Kind, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
# A text, token ids, or the messages of a chat.
Content = str | list[int] | list[dict[str, str]]


def body(
    kind: Kind,
    content: Content,
    sampling: Mapping[str, Any],
    *,
    model: str,
    max_tokens: int,
    stream: bool,
) -> dict[str, Any]:
    """Returns the JSON body of one request; `sampling` has the keys of `SamplingParams`."""
    if kind == "generate":
        name = "text" if isinstance(content, str) else "input_ids"
        options = {**sampling, "max_new_tokens": max_tokens}
        return {name: content, "sampling_params": options, "stream": stream}
    found = {"model": model, **sampling, "max_tokens": max_tokens}
    if kind == "chat":
        is_text = isinstance(content, str)
        found["messages"] = [{"role": "user", "content": content}] if is_text else content
    else:
        found["prompt"] = content
    found["stream"] = stream
    if stream:
        # The server then sends counts with every chunk, so that inter-token latency is exact.
        found["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return found


class Answer:
    """The answer to one request so far; a field that the server does not send stays None.

    `tokens` is the server's count, or the number of pieces of text if the server does not count.
    """

    def __init__(self, kind: Kind):
        self._kind = kind
        self.reasoning = ""  # what a reasoning parser took out of the text
        self.text = ""
        self.finish_reason: str | None = None
        self.tokens = 0
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.nfe: int | None = None
        self.blocks: int | None = None

    def add(self, event: Any) -> None:
        """Adds one event, or a whole answer; raises the error that it carries, if any."""
        if not isinstance(event, dict) or event.get("error"):
            shown = str(event)[: transport.MAX_ERROR_CHARS]
            raise failures.BadAnswer(f"the server answers {shown}")
        if self._kind == "generate":
            counts = event.get("meta_info") or {}
            is_new = len(event.get("text") or "") > len(self.text)
            self.text = event.get("text") or self.text
            self.cached_tokens = counts.get("cached_tokens", self.cached_tokens)
            reason = counts.get("finish_reason")
        else:
            counts = event.get("usage") or {}
            details = counts.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens", self.cached_tokens)
            choice = next(iter(event.get("choices") or ()), {})
            reasoning, text = self._pieces(choice)
            is_new = bool(reasoning or text)
            self.reasoning += reasoning
            self.text += text
            reason = choice.get("finish_reason")
        dllm = counts.get("dllm") or {}
        self.prompt_tokens = counts.get("prompt_tokens", self.prompt_tokens)
        self.completion_tokens = counts.get("completion_tokens", self.completion_tokens)
        self.nfe = dllm.get("nfe", self.nfe)
        self.blocks = dllm.get("blocks", self.blocks)
        if isinstance(reason, dict):
            if reason.get("type") == "abort":
                message = reason.get("message")
                raise failures.BadAnswer(f"the server aborted the request: {message}")
            reason = reason.get("type")
        self.finish_reason = self.finish_reason if reason is None else reason
        counted = counts.get("completion_tokens")
        # Without counts, each piece of text counts as one token: nothing better is known.
        self.tokens = max(self.tokens, self.tokens + is_new if counted is None else counted)

    def _pieces(self, choice: Mapping[str, Any]) -> tuple[str, str]:
        """Returns the new (reasoning, text)."""
        if self._kind == "completions":
            return "", choice.get("text") or ""
        message = choice.get("delta") or choice.get("message") or {}
        return message.get("reasoning_content") or "", message.get("content") or ""
