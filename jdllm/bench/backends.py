"""The servers that can be measured, by SGLang's names, and one request to one of them.

`jdllm` (the default) and `sglang` use POST /generate, the names with `-oai` OpenAI's completions
and those with `-oai-chat` its chat completions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from jdllm.bench import command_line, prompts, stats
from jdllm.client import api, failures, transport

# Backend -> (kind, default port).
BACKENDS: dict[str, tuple[api.Kind, int]] = {
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
    """What all requests of a run have in common; `extra` is merged into the body."""

    kind: api.Kind
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
        body = api.body(
            self.kind,
            prompt.content,
            sampling,
            model=self.model,
            max_tokens=prompt.output_len,
            stream=self.stream,
        )
        return command_line.merged(body, self.extra)


def send(client: transport.Client, prompt: prompts.Prompt, options: Options) -> stats.Record:
    """Sends one request and returns its record; a failure is put into `error`, not raised."""
    answer = api.Answer(options.kind)
    commits: list[stats.Commit] = []
    body = options.body(prompt)
    start_s = time.perf_counter()
    error = None
    try:
        for at_s, event in client.events(api.ROUTES[options.kind], body):
            before = answer.tokens
            answer.add(event)
            if answer.tokens > before:
                counts = {"blocks": answer.blocks, "nfe": answer.nfe}
                commits.append(stats.Commit(at_s=at_s, tokens=answer.tokens, **counts))
        if answer.finish_reason is None:
            error = "the answer ended without a finish reason"
    except failures.CallFailed as failure:
        error = str(failure)
    end_s = time.perf_counter()
    counted = answer.completion_tokens
    return stats.Record(
        start_s=start_s,
        end_s=end_s,
        prompt_tokens=answer.prompt_tokens or prompt.prompt_len or 0,
        # As in SGLang: if the server does not count, the number of tokens that was asked for.
        completion_tokens=prompt.output_len if counted is None else counted,
        commits=tuple(commits),
        nfe=answer.nfe,
        blocks=answer.blocks,
        cached_tokens=answer.cached_tokens,
        text=answer.reasoning + answer.text,
        error=error,
    )
