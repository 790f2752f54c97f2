"""The engine as people use it: `generate` in a notebook, `stream` under the server.

One process has one engine thread and any number of caller threads or asyncio loops. Work on
text (templates, tokenising, detokenising) happens on the caller's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from jdllm import errors
from jdllm.engine import (
    control,
    generations,
    infilling,
    info,
    input_processor,
    requests,
    streams,
)
from jdllm.engine.start import build, startup
from jdllm.engine.stats import EngineStats
from jdllm.engine.trace import Trace
from jdllm.foreign import names
from jdllm.models import loading
from jdllm.options import hints
from jdllm.options.config import EngineConfig
from jdllm.templates import chat


class Engine(control.EngineControl):
    """Serves one model; keyword arguments are the fields of `EngineConfig`.

    Without arguments it serves the bundled model. Use it as a context manager, or call
    `shutdown`; an engine that nobody refers to is shut down by the garbage collector.
    """

    output_modality: Literal["text"] = "text"

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: startup.StartupProgress | None = None,
        **options: Any,
    ):
        self.progress = progress or startup.StartupProgress()
        self._built = control.built(build.build, config, options, self.progress)
        self.config = self._built.config
        self.device = self._built.device
        self.spec = self._built.spec
        self.tokenizer = self._built.tokenizer
        self.model_name = self.config.served_model_name or ""  # `build.build` gives it a value
        self.model_dir = self._built.model_dir
        self.context_length = self._built.sizes.context_length
        self.max_running_requests = self._built.sizes.max_running_requests
        self.max_total_tokens = self._built.sizes.num_pages * self._built.sizes.page_size
        self._inputs = input_processor.InputProcessor(self._built)
        super().__init__(self._built.core, self._built.runner.release)
        self.progress.enter("ready")

    # Generation

    @names.explained(hints.BESIDE_SAMPLING_PARAMS)
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: requests.Params | Sequence[requests.Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        rid: str | Sequence[str] | None = None,
        stream: bool = False,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
        priority: int | None = None,
        add_special_tokens: bool = True,
    ) -> Any:
        """Returns a dict (text, output_ids, meta_info) for one prompt, a list of them for a list.

        With `stream=True` it returns an iterator, which yields dicts with cumulative text as
        blocks commit; for several prompts or choices each dict carries its `index`. If a prompt
        asks for `stream_mode` "denoise", `frames` show its output after each step.
        Models with full attention can write towards a `suffix` (text or ids) and around
        tokens that are `given` at offsets from the prompt's end. Both may be one value for all
        prompts, or a list with one per prompt. `priority` is for all of them, and needs
        `enable_priority_scheduling`. Without `add_special_tokens` a text has only its own.
        """
        choices, collector = self._call(
            prompt, input_ids, sampling_params, rid, suffix, given, priority, add_special_tokens
        )
        if stream:
            return streams.ChoiceStream(self._loop, choices, collector.part)
        requests.refuse_steps(choice.request.sampling for choice in choices.values())
        with contextlib.closing(self._iterate(choices)) as events:
            for generation in events:
                collector.add(generation)
        return collector.answer()

    @names.explained(hints.BESIDE_SAMPLING_PARAMS)
    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: requests.Params | Sequence[requests.Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        rid: str | Sequence[str] | None = None,
        stream: bool = False,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
        priority: int | None = None,
        add_special_tokens: bool = True,
    ) -> Any:
        """Does what `generate` does, for an asyncio caller; the input is prepared in a thread.

        With `stream=True` it returns an async iterator of what `generate(stream=True)` yields.
        """
        choices, collector = await asyncio.to_thread(
            self._call,
            prompt,
            input_ids,
            sampling_params,
            rid,
            suffix,
            given,
            priority,
            add_special_tokens,
        )
        if not stream:
            requests.refuse_steps(choice.request.sampling for choice in choices.values())
        events = streams.async_stream(self._loop, lambda: choices, size=0, is_bounded=False)
        if stream:
            return streams.transformed(events, collector.part)
        async with contextlib.aclosing(events):
            async for generation in events:
                collector.add(generation)
        return collector.answer()

    def iterate(
        self,
        prompts: str | Sequence[int] | Sequence[requests.Prompt],
        params: requests.Params | Sequence[requests.Params] = None,
        *,
        request_ids: Sequence[str] | None = None,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
        priority: int | None = None,
    ) -> streams.ChoiceStream[generations.Generation, generations.Generation]:
        """Yields the generations of several prompts as they come, for batch jobs.

        A prompt is text or token ids, and params may be dicts; without a length a prompt gets the
        rest of the context. If one prompt is refused, all are, and this call raises. Closing the
        iterator aborts them.
        """
        rows = requests.prompt_rows(prompts)
        each = requests.params_per_prompt(params, len(rows), requests.as_params)
        return self._iterate(
            self._inputs.choices(
                rows, each, request_ids=request_ids, suffix=suffix, given=given, priority=priority
            )
        )

    def stream(
        self,
        prompts: str | Sequence[int] | Sequence[requests.Prompt],
        params: requests.Params | Sequence[requests.Params] = None,
        *,
        request_ids: Sequence[str] | None = None,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
        priority: int | None = None,
    ) -> AsyncGenerator[generations.Generation, None]:
        """Does what `iterate` does, for an asyncio server: the queue limit applies.

        If there are more choices than can run and wait, this call raises, before it has looked at
        the prompts. If a prompt is refused, the first step of the iterator raises; it does large
        work in a thread.
        """
        rows = requests.prompt_rows(prompts)
        each = requests.params_per_prompt(params, len(rows), requests.as_params)
        num_choices = sum(one.n for one in each)
        self.check_places(num_choices, len(rows))
        build = functools.partial(
            self._inputs.choices,
            rows,
            each,
            request_ids=request_ids,
            suffix=suffix,
            given=given,
            priority=priority,
        )
        size = input_processor.size(rows) + input_processor.SIZE_OF_A_CHOICE * num_choices
        return streams.async_stream(self._loop, build, size=size, is_bounded=True)

    def check_places(self, num_choices: int, num_prompts: int = 1) -> None:
        """Raises if so many choices can never run and wait, or `QueueFull` if they cannot now.

        While other requests arrive, this is a forecast: `stream` decides, for all or none of them.
        """
        assert self.config.max_queued_requests is not None, "build.build gives it a value"
        self._check_places(
            num_choices,
            self.max_running_requests + self.config.max_queued_requests,
            errors.described_choices(num_choices, num_prompts),
            "n" if num_prompts == 1 else "prompt",
        )

    def trace(
        self,
        prompt: requests.Prompt | chat.Messages,
        sampling_params: requests.Params = None,
        *,
        suffix: infilling.Suffix | None = None,
        given: infilling.Given | None = None,
        escape_special_tokens: bool | None = None,
    ) -> Trace:
        """Returns one answer with its denoising steps; `.show()` draws them.

        A prompt is text or token ids as they stand, or the messages of a conversation, which go
        through the chat template (for `escape_special_tokens` see `LLM.chat`). Parameters are those
        of `generate`, for one choice; `suffix` and `given` too. An algorithm that moves tokens is
        refused: positions do not tell its decisions.
        """
        params = requests.with_length(sampling_params)
        if params.n != 1:
            raise errors.RequestError(f"a trace shows one choice, got n={params.n}", param="n")
        asked = dataclasses.replace(
            params, dllm=params.dllm.with_stream_mode("denoise"), return_step_map=True
        )
        ids = self._inputs.one_prompt(prompt, escape_special_tokens=escape_special_tokens)
        choices = self._inputs.choices([ids], [asked], suffix=[suffix], given=[given])
        (choice,) = choices.values()
        declared = choice.request.sampling.dllm.declared
        if declared is not None and declared.moves_tokens:
            raise errors.RequestError(
                f"a trace tells what each position decided, and {declared.name} moves tokens; the "
                'frames of `generate` with dllm.stream_mode "denoise" show them',
                param="dllm.algorithm",
            )
        with contextlib.closing(self._iterate(choices)) as events:
            seen = list(events)
        frames = [frame for one in seen for frame in one.frames]
        return Trace.of(frames, seen[-1], self._inputs.visible_text)

    # Information

    @property
    def model(self) -> loading.LoadedModel:
        """The model that is served, for inspection; `shutdown` frees its weights."""
        return self._built.model

    def default_max_new_tokens(self, prompt_len: int, block_length: int | None = None) -> int:
        """Returns the tokens left in the context, 1 or more; a canvas gives whole blocks."""
        return self._inputs.default_max_new_tokens(prompt_len, block_length)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of plain text."""
        return self._inputs.encode(text, add_special_tokens=add_special_tokens)

    def stats(self) -> EngineStats:
        """Returns a snapshot; approximate while a launch is in flight."""
        return info.stats(self._built)

    def server_info(self) -> dict[str, Any]:
        """Returns resolved options, kernels, devices and one `internal_states` entry."""
        return info.server_info(self._built)

    def get_server_info(self) -> dict[str, Any]:
        """SGLang's name of `server_info`."""
        return self.server_info()

    def model_info(self) -> dict[str, Any]:
        """Returns what SGLang's `/model_info` returns."""
        return info.model_info(self._built)

    # Internals

    def _call(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        params: requests.Params | Sequence[requests.Params],
        rid: str | Sequence[str] | None,
        suffix: infilling.Suffixes,
        given: infilling.Givens,
        priority: int | None,
        add_special_tokens: bool,
    ) -> tuple[dict[str, requests.Choice], generations.Collector]:
        """Returns the choices that a call of `generate` asks for, and a collector of its answer."""
        prompts, is_single = self._inputs.prompt_ids(
            prompt, input_ids, add_special_tokens=add_special_tokens
        )
        rows = requests.params_per_prompt(params, len(prompts))
        choices = self._inputs.choices(
            prompts, rows, request_ids=rid, suffix=suffix, given=given, priority=priority
        )
        return choices, generations.Collector(choices, is_single=is_single)

    def _iterate(
        self, choices: dict[str, requests.Choice]
    ) -> streams.ChoiceStream[generations.Generation, generations.Generation]:
        return streams.ChoiceStream(self._loop, choices, lambda generation: generation)
