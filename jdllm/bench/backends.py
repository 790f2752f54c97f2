"""The routes a server can be asked by: what is sent, and what its answers say.

Names are SGLang's backends. `jdllm` (our default) and `sglang` are POST /generate, the
`-oai` ones OpenAI's completions, the `-oai-chat` ones chat.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Literal

from jdllm.bench import command_line, prompts, stats
from jdllm.client import transport

Kind = Literal["generate", "completions", "chat"]
ROUTES: dict[Kind, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
# Backend -> (kind, default port).
BACKENDS: dict[str, tuple[Kind, int]] = {
    "jdllm": ("generate", 30000),
    "sglang": ("generate", 30000),
    "sglang-native": ("generate", 30000),
    "sglang-oai": ("completions", 30000),
    "sglang-oai-chat": ("chat", 30000),
    "vllm": ("completions", 8000),
    "vllm-chat": ("chat", 8000),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every request of a run has in common; `extra` is merged into the body."""

    kind: Kind
    model: str
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = True
    stream: bool = True
    dllm: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def body(self, prompt: prompts.Prompt) -> dict[str, Any]:
        """Returns the JSON body of one request."""
        sampling: dict[str, Any] = {"temperature": self.temperature, "ignore_eos": self.ignore_eos}
        if self.top_p < 1.0:
            sampling["top_p"] = self.top_p
        if self.dllm:
            sampling["dllm"] = dict(self.dllm)
        content = prompt.content
        if self.kind == "generate":
            name = "text" if isinstance(content, str) else "input_ids"
            sampling["max_new_tokens"] = prompt.output_len
            body = {name: content, "sampling_params": sampling, "stream": self.stream}
            return command_line.merged(body, self.extra)
        body = {"model": self.model, **sampling, "max_tokens": prompt.output_len}
        if self.kind == "chat":
            is_text = isinstance(content, str)
            body["messages"] = [{"role": "user", "content": content}] if is_text else content
        else:
            body["prompt"] = content
        body["stream"] = self.stream
        if self.stream:
            # Counts with every piece, so that inter-token latency needs no guess.
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return command_line.merged(body, self.extra)


def ask(client: transport.Client, prompt: prompts.Prompt, options: Options) -> stats.Record:
    """Sends one request and returns its record; a failure is in `error`, not raised."""
    answer = _Answer(options.kind)
    body = options.body(prompt)
    start_s = time.perf_counter()
    error = None
    try:
        for at_s, event in client.events(ROUTES[options.kind], body):
            answer.add(at_s, event)
        if not answer.is_ended:
            error = "the answer ended without a finish reason"
    except transport.HttpError as failure:
        error = str(failure)
    except _Refused as failure:
        error = str(failure)
    end_s = time.perf_counter()
    told = answer.completion_tokens
    return stats.Record(
        start_s=start_s,
        end_s=end_s,
        prompt_tokens=answer.prompt_tokens or prompt.prompt_len or 0,
        # Like SGLang: what was asked for, where the server counts nothing.
        completion_tokens=prompt.output_len if told is None else told,
        commits=tuple(answer.commits),
        nfe=answer.nfe,
        blocks=answer.blocks,
        cached_tokens=answer.cached_tokens,
        text=answer.text,
        error=error,
    )


class _Refused(RuntimeError):
    """An error that came as an event."""


class _Answer:
    """Collects the events of one request."""

    def __init__(self, kind: Kind):
        self._kind = kind
        self.commits: list[stats.Commit] = []
        self.text = ""
        self.is_ended = False
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.nfe: int | None = None
        self.blocks: int | None = None
        self._shown = 0

    def add(self, at_s: float, event: Any) -> None:
        if not isinstance(event, dict) or event.get("error"):
            raise _Refused(f"the server answers {str(event)[: transport.MAX_ERROR_CHARS]}")
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
            piece = self._piece(choice)
            is_new = bool(piece)
            self.text += piece
            reason = choice.get("finish_reason")
        self.is_ended = self.is_ended or reason is not None
        dllm = counts.get("dllm") or {}
        self.prompt_tokens = counts.get("prompt_tokens", self.prompt_tokens)
        self.completion_tokens = counts.get("completion_tokens", self.completion_tokens)
        self.nfe = dllm.get("nfe", self.nfe)
        self.blocks = dllm.get("blocks", self.blocks)
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise _Refused(f"the server aborted the request: {reason.get('message')}")
        told = counts.get("completion_tokens")
        # Without counts each piece of text is one token, which is all that can be known.
        tokens = (self._shown + int(is_new)) if told is None else told
        if tokens > self._shown:
            self._shown = tokens
            self.commits.append(
                stats.Commit(at_s=at_s, tokens=tokens, blocks=self.blocks, nfe=self.nfe)
            )

    def _piece(self, choice: Mapping[str, Any]) -> str:
        if self._kind == "completions":
            return choice.get("text") or ""
        message = choice.get("delta") or choice.get("message") or {}
        return (message.get("reasoning_content") or "") + (message.get("content") or "")
