"""OpenAI answers: one object, or chunks, made from the engine's events.

Chat and text completions differ only in names and in the form of a choice; `Shape` holds that
difference. `usage` counts each prompt once, and every token that is returned; `usage.dllm`
holds the denoising statistics.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette import requests
from starlette import responses as starlette_responses

from jdllm.server import running, sse, state
from jdllm.server.edge import responses, token_texts
from jdllm.server.openai import denoise_frames
from jdllm.server.openai.requests import OpenAIRequest, StreamOptions

if TYPE_CHECKING:
    from jdllm.engine import generations

Choice = dict[str, Any]
SUMMED = ("nfe", "blocks", "edited_tokens", "discarded_tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one endpoint writes its objects."""

    object_name: str
    chunk_object_name: str
    choice: Callable[[int, generations.Generation], Choice]
    # (choice index, event, whether it is the choice's first) -> choices, one per chunk
    chunk_choices: Callable[[int, generations.Generation, bool], list[Choice]]
    # (tokens to list, event, texts) -> the object of a choice
    logprobs: Callable[
        [Sequence[token_texts.Listed], generations.Generation, token_texts.TokenTexts],
        dict[str, Any],
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one request, whose prompts share their options."""

    server: state.ServerState
    shape: Shape
    prompt_list: running.PromptList
    answer_id: str
    body: OpenAIRequest
    created_s: int = dataclasses.field(default_factory=lambda: int(time.time()))

    async def respond(self, request: requests.Request) -> starlette_responses.Response:
        """Returns the whole answer or a stream of chunks, as the body asks."""
        if self.body.stream:
            return sse.EventStream(self._frames(), ping_interval_s=self.server.ping_interval_s)
        work = running.collect(self.server, self.prompt_list)
        finals = await running.unless_client_leaves(request, work)
        choices = [self.shape.choice(index, one) for index, one in enumerate(finals)]
        if self._has_logprobs:
            for choice, one in zip(choices, finals, strict=True):
                choice["logprobs"] = self._logprobs(self._listed_tokens(), one)
        content = self._object(self.shape.object_name, choices)
        if self.body.return_cached_tokens_details:
            content |= cached_tokens(finals)
        return responses.json_response(content | {"usage": usage(finals)})

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options or StreamOptions()
        last: dict[int, generations.Generation] = {}
        listed = collections.defaultdict(self._listed_tokens)
        frames = self._denoise_frames()
        async with contextlib.aclosing(running.stream(self.server, self.prompt_list)) as events:
            async for one in events:
                index = self.prompt_list.choice_index(one)
                is_first = index not in last
                last[index] = one
                if frames is not None and one.frames:
                    # Read before the tokens that they led to become final.
                    for found in frames.of(index, one):
                        yield sse.frame(self._object(denoise_frames.OBJECT, []) | found)
                choices = self.shape.chunk_choices(index, one, is_first)
                if self._has_logprobs and choices:
                    _with_text(choices)["logprobs"] = self._logprobs(listed[index], one)
                for choice in choices:
                    chunk = self._object(self.shape.chunk_object_name, [choice])
                    if options.continuous_usage_stats:
                        chunk["usage"] = usage([one])
                    elif options.include_usage:
                        chunk["usage"] = None
                    # In a chunk with a choice, because SGLang's client reads it there.
                    if self.body.return_cached_tokens_details and one.finish_reason is not None:
                        chunk |= cached_tokens([one])
                    yield sse.frame(chunk)
        if options.include_usage:
            finals = [last[key] for key in sorted(last)]
            chunk = self._object(self.shape.chunk_object_name, [])
            yield sse.frame(chunk | {"usage": usage(finals)})

    def _denoise_frames(self) -> denoise_frames.Frames | None:
        if not any(one.shows_steps for one in self.prompt_list.params):
            return None
        skips = self.body.skip_special_tokens is not False
        return denoise_frames.Frames(self.server.tokenizer, skip_special_tokens=skips)

    def _listed_tokens(self) -> token_texts.ListedTokens:
        # The prompts differ in their limit at most.
        return token_texts.ListedTokens(self.server.token_texts, self.prompt_list.params[0])

    def _logprobs(
        self, listed: token_texts.ListedTokens, one: generations.Generation
    ) -> dict[str, Any]:
        return self.shape.logprobs(listed.update(one), one, self.server.token_texts)

    @property
    def _has_logprobs(self) -> bool:
        return self.body.num_top_logprobs() is not None

    def _object(self, name: str, choices: list[Choice]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": name,
            "created": self.created_s,
            "model": self.server.engine.model_name,
            "choices": choices,
        }


def _with_text(choices: list[Choice]) -> Choice:
    """Returns the choice of an event's chunks that has its text, or else the last one."""
    texts = (one for one in choices if one.get("text") or one.get("delta", {}).get("content"))
    return next(texts, choices[-1])


def ending(generation: generations.Generation) -> dict[str, Any]:
    """Returns the fields of a choice that say how it ended."""
    finish = generation.finish_reason
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}


def cached_tokens(choices: Sequence[generations.Generation]) -> dict[str, Any]:
    """Returns SGLang's object about cached prompt tokens; only the device has a cache."""
    count = usage(choices)["prompt_tokens_details"]["cached_tokens"]
    return {"sglext": {"cached_tokens_details": {"device": count, "host": 0}}}


def usage(choices: Sequence[generations.Generation]) -> dict[str, Any]:
    """Returns OpenAI's `usage` over the choices of one request, with `dllm` beside it."""
    # The choices of a prompt share its tokens, so only the first choice counts them.
    firsts = [one.meta_info for one in choices if one.index == choices[0].index]
    prompt = sum(meta["prompt_tokens"] for meta in firsts)
    completion = sum(one.meta_info["completion_tokens"] for one in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(m["cached_tokens"] for m in firsts)},
        "dllm": _dllm_usage([one.meta_info["dllm"] for one in choices]),
    }


def _dllm_usage(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one choice's statistics as they are, or the sums over several."""
    if len(parts) == 1:
        return dict(parts[0])
    total = dict(parts[0]) | {name: sum(part[name] for part in parts) for name in SUMMED}
    tokens = sum(part["tpf"] * part["nfe"] for part in parts)
    total["tpf"] = round(tokens / total["nfe"], 4) if total["nfe"] else 0.0
    return total
