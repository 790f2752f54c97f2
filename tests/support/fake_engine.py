"""A computable engine that obeys the interface of `jdllm.engine.engine.Engine`.

Token i of a request is a letter, a function of prompt and suffix and the choice alone, so a
test knows every text. Blocks of 4 tokens come `block_s` apart. `open_requests` are
the ids of requests whose iterator is open: what holds pages in the real engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from support import fake_serving

from jdllm import errors, spec
from jdllm.engine import generations, requests, stats
from jdllm.options import config, sampling_params
from jdllm.scheduler import commits
from jdllm.templates import chat, conversations

BLOCK = 4
VOCAB = 256
CONTEXT = 512
FAULT = "the model's outputs are not numbers (NaN)"
SPEC = spec.ModelSpec(
    architecture="Fake",
    model_type="fake",
    vocab_size=VOCAB,
    hidden_size=1,
    num_layers=1,
    num_query_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position_embeddings=CONTEXT,
    diffusion=spec.DiffusionSpec(block_size=BLOCK, mask_token_id=None, eos_token_ids=()),
    rotary_dim=1,
)

FULL_ATTENTION_SPEC = dataclasses.replace(
    SPEC,
    diffusion=dataclasses.replace(SPEC.diffusion, attention_pattern=spec.AttentionPattern.FULL),
)


def expected_ids(prompt_ids: list[int], count: int, choice: int = 0) -> list[int]:
    return [97 + (sum(prompt_ids) + 7 * choice + i) % 26 for i in range(count)]


def expected_text(prompt: str, count: int, choice: int = 0) -> str:
    return bytes(expected_ids(list(prompt.encode()), count, choice)).decode()


# It has no header for answers, so that a test can say what a prompt is.
TEMPLATE = chat.ChatTemplate(
    "{% for m in messages %}{% set text = '<' ~ m.role ~ '>' ~ m.content %}"
    "{{ text | upper if shout else text }}{% endfor %}"
)


class FakeTokenizer:
    """One token per UTF-8 byte."""

    def __init__(self, *, has_chat_template: bool = True):
        self.has_chat_template = has_chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_special_tokens: bool = False,
        escape_special_tokens: bool | None = None,
        **options: Any,
    ) -> list[int]:
        del escape_special_tokens  # none of its tokens is special
        variables = options.pop("chat_template_kwargs", None)
        turns = conversations.for_template(messages, TEMPLATE.abilities)
        text = TEMPLATE.render(turns, variables=variables, **options)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def token_strings(self, ids: list[int]) -> list[str]:
        return [bytes([token]).decode("latin-1") for token in ids]


class FakeEngine(fake_serving.FakeServing):
    output_modality = "text"

    def __init__(
        self,
        *,
        block_s: float = 0.0,
        max_queued: int = 1000,
        tokenizer: FakeTokenizer | None = None,
        skip_tokenizer_init: bool = False,
        refusal: errors.RequestError | None = None,
        model_spec: spec.ModelSpec = SPEC,
        engine_config: config.EngineConfig | None = None,
    ):
        super().__init__(max_queued=max_queued, engine_config=engine_config)
        self.spec = model_spec
        self.tokenizer = None if skip_tokenizer_init else tokenizer or FakeTokenizer()
        self.model_name = "fake-model"
        self.context_length = CONTEXT
        self.max_running_requests = 8
        self.max_total_tokens = 4096
        self.seen_params: list[sampling_params.SamplingParams] = []
        self.seen_prompts: list[list[int]] = []
        self.seen_suffixes: list[list[int]] = []
        self._block_s = block_s
        self._refusal = refusal
        self._tokens = 0

    async def stream(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[sampling_params.SamplingParams],
        *,
        request_ids: Sequence[str],
        suffix: Sequence[int] = (),
        priority: int | None = None,
    ) -> AsyncGenerator[generations.Generation, None]:
        if not self._admitting:
            raise errors.EngineStopped("the engine is draining")
        self.check_places(len(prompts))
        self.seen_priorities.append(requests.priority_class(priority, self.config))
        rows = list(zip(prompts, params, request_ids, strict=True))
        for prompt_ids, one, request_id in rows:
            self._check(prompt_ids, one, request_id, suffix)
        for prompt_ids, one, request_id in rows:
            self.seen_params.append(one)
            self.seen_prompts.append(prompt_ids)
            self.seen_suffixes.append(list(suffix))
            self.open_requests.add(request_id)
        began = time.monotonic()
        try:
            if [0, 253] in prompts:
                await asyncio.sleep(self._block_s)
                yield self._fault(rows[prompts.index([0, 253])])
                raise AssertionError("nobody reads on behind a fault")
            if [0, 255] in prompts:
                raise RuntimeError("secret detail of a fault")
            running = {(i, c) for i, one in enumerate(params) for c in range(one.n)}
            before = 0
            while running:
                await asyncio.sleep(self._block_s)
                for place in sorted(running):
                    generation = self._generation(rows[place[0]], suffix, place, before, began)
                    if generation.finish_reason is not None:
                        running.discard(place)
                    yield generation
                if before and [0, 254] in prompts:
                    raise RuntimeError("secret detail of a late fault")
                self.open_requests -= {
                    name
                    for i, name in enumerate(request_ids)
                    if not any(i == j for j, _ in running)
                }
                before += BLOCK
        finally:
            self.open_requests.difference_update(request_ids)

    def check_places(self, num_choices: int, num_prompts: int = 1) -> None:
        if len(self.open_requests) + num_choices > self._max_queued:
            raise errors.QueueFull("The request queue is full.")

    def _fault(
        self, row: tuple[list[int], sampling_params.SamplingParams, str]
    ) -> generations.Generation:
        """Returns a choice that ends as one with NaN logits does, after a block."""
        finish = generations.finish_dict(
            commits.FinishReason(kind="abort", finished_len=BLOCK, message=FAULT)
        )
        one = self._generation(row, (), (0, 0), 0, time.monotonic())
        meta = one.meta_info | {"finish_reason": finish}
        return dataclasses.replace(one, finish_reason=finish, meta_info=meta)

    def _check(
        self,
        prompt_ids: list[int],
        params: sampling_params.SamplingParams,
        request_id: str,
        suffix: Sequence[int],
    ) -> None:
        """Raises what the engine refuses; nothing of a list runs when one of it is refused."""
        if self._refusal is not None:
            raise self._refusal
        if request_id in self.open_requests:
            raise errors.RequestError(f"request id {request_id!r} is in use", param="rid")
        params.dllm.resolve(sampling_params.DllmParams())  # refuses what its algorithm rules out
        if suffix and self.spec is not FULL_ATTENTION_SPEC:
            raise errors.RequestError("suffix needs a full-attention model", param="suffix")
        fixed = len(prompt_ids) + len(suffix)
        if fixed + params.max_new_tokens > CONTEXT:
            raise errors.RequestTooLong(
                f"{errors.maximum_context(CONTEXT)}, but the prompt has {fixed} tokens and "
                f"max_new_tokens={params.max_new_tokens}; lower max_new_tokens",
                param="prompt" if len(prompt_ids) >= CONTEXT else "max_new_tokens",
            )

    def _generation(
        self,
        row: tuple[list[int], sampling_params.SamplingParams, str],
        suffix: Sequence[int],
        place: tuple[int, int],
        before: int,
        began: float,
    ) -> generations.Generation:
        """Returns the choice at `place` (prompt, choice) with the block after `before` tokens."""
        (prompt_ids, params, request_id), (prompt_index, index) = row, place
        fixed_ids = [*prompt_ids, *suffix]
        count = min(before + BLOCK, params.max_new_tokens)
        ids = expected_ids(fixed_ids, count, index)
        finish: dict[str, Any] | None = None
        stops = [i for i, token in enumerate(ids) if token in params.stop_token_ids]
        if request_id in self._aborted:
            ids, finish = ids[:before], {"type": "abort", "message": "aborted"}
        elif stops:
            finish = {"type": "stop", "matched": ids[stops[0]]}
            ids = ids[: stops[0]]
        elif count == params.max_new_tokens:
            finish = {"type": "length", "length": count}
        blocks = -(-len(ids) // BLOCK)
        self._tokens += len(ids[before:])
        dllm = {
            "nfe": 2 * blocks,
            "tpf": len(ids) / (2 * blocks) if blocks else 0.0,
            "blocks": blocks,
            "edited_tokens": 1,
            "discarded_tokens": 0,
            "algorithm": params.dllm.algorithm or "LowConfidence",
            "threshold": params.dllm.threshold or 0.95,
        }
        meta = {
            "id": request_id if params.n == 1 else f"{request_id}-{index}",
            "finish_reason": finish,
            "prompt_tokens": len(fixed_ids),
            "completion_tokens": len(ids),
            "cached_tokens": 2,
            "e2e_latency": time.monotonic() - began,
            "queue_time": 0.0,
            "weight_version": "default",
            "nfe": dllm["nfe"],
            "tpf": dllm["tpf"],
            "dllm": dllm,
        }
        if params.return_logprob:
            meta["output_token_logprobs"] = [(-i / 8, token, None) for i, token in enumerate(ids)]
        if params.top_logprobs:
            meta["output_top_logprobs"] = [
                [(-i / 8 - k, token + k, None) for k in range(params.top_logprobs)]
                for i, token in enumerate(ids)
            ]
        return generations.Generation(
            request_id=meta["id"],
            index=index,
            prompt_index=prompt_index,
            text=bytes(ids).decode(),
            delta_text=bytes(ids[before:]).decode(),
            output_ids=ids,
            delta_ids=ids[before:],
            finish_reason=finish,
            meta_info=meta,
        )

    def generate(self, *, input_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        return {"text": "", "output_ids": [], "meta_info": {}}

    def default_max_new_tokens(self, prompt_len: int) -> int:
        return max(1, CONTEXT - prompt_len)

    def stats(self) -> stats.EngineStats:
        values = {
            field: 0 for field in stats.EngineStats.__dataclass_fields__ if field != "token_usage"
        }
        values["num_running_reqs"] = len(self.open_requests)
        values["generation_tokens_total"] = self._tokens
        return stats.EngineStats(token_usage=0.25, **values)
