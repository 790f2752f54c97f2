"""The engine as people use it: `generate` in a notebook, `stream` under the server.

One process, one engine thread; any number of caller threads or asyncio loops. Text
work (templates, tokenising, detokenising) happens on the caller's side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jdllm import config as config_lib
from jdllm import errors, sampling_params
from jdllm.engine import build, generations, infilling, info, requests, startup, streams
from jdllm.engine import loop as loop_lib
from jdllm.engine import stats as stats_lib
from jdllm.models import loading
from jdllm.scheduler import request as request_lib

# Of a canvas whose length nobody named; that of the published evaluations of such models.
CANVAS_TOKENS = 256


class Engine:
    """Serves one model; keyword arguments are the fields of `EngineConfig`.

    Without arguments the bundled model is served. Use it as a context manager, or
    call `shutdown`; a forgotten engine is shut down when it is collected.
    """

    def __init__(
        self,
        config: config_lib.EngineConfig | None = None,
        *,
        progress: startup.StartupProgress | None = None,
        **options: Any,
    ):
        if config is None:
            config = config_lib.from_mapping(config_lib.EngineConfig, options)
        elif options:
            raise TypeError("give either a config or keyword options, not both")
        self.progress = progress or startup.StartupProgress()
        try:
            self._built = build.build(config, self.progress)
        except Exception as error:
            self.progress.enter("failed", error=str(error))
            raise
        self.config = self._built.config
        self.spec = self._built.spec
        self.tokenizer = self._built.tokenizer
        self.model_name = self.config.served_model_name
        self.context_length = self._built.sizes.context_length
        self.max_running_requests = self._built.sizes.max_running_requests
        self.max_total_tokens = self._built.sizes.num_pages * self._built.sizes.page_size
        self._random = random.Random(config.random_seed)
        self._loop = loop_lib.EngineLoop(self._built.core)
        self._finalizer = weakref.finalize(self, loop_lib.EngineLoop.stop, self._loop)
        self.progress.enter("ready")

    # Generation

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
    ) -> Any:
        """Returns a dict (text, output_ids, meta_info) for one prompt, a list for a list.

        With `stream=True` an iterator of such dicts with cumulative text, as blocks
        commit; for several prompts or choices each dict carries its `index`.
        Models with full attention can write towards a `suffix` (text or ids) and around
        tokens `given` at offsets from the prompt's end; one for all prompts, or a list.
        """
        fixed = (suffix, given)
        choices, is_single = self._choices_of(prompt, input_ids, sampling_params, rid, fixed)
        if stream:
            return streams.GenerationStream(self._loop, choices, _dict_maker(choices, is_single))
        with contextlib.closing(self._stream(choices)) as events:
            final = {
                generation.request_id: generation.as_dict()
                for generation in events
                if generation.finish_reason is not None
            }
        return _in_order(choices, final, is_single)

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: requests.Params | Sequence[requests.Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        rid: str | Sequence[str] | None = None,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
    ) -> Any:
        """Like `generate` without streaming, for an asyncio caller."""
        fixed = (suffix, given)
        choices, is_single = self._choices_of(prompt, input_ids, sampling_params, rid, fixed)
        final = {}
        generations = streams.as_they_come(self._loop, choices, is_bounded=False)
        async with contextlib.aclosing(generations) as events:
            async for generation in events:
                if generation.finish_reason is not None:
                    final[generation.request_id] = generation.as_dict()
        return _in_order(choices, final, is_single)

    def iterate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[sampling_params.SamplingParams],
        *,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
    ) -> Iterator[generations.Generation]:
        """Yields the generations of several prompts as they come, for batch jobs."""
        rids = requests.request_ids(None, len(prompts))
        fixed = infilling.infills(suffix, given, len(prompts), self.tokenizer)
        return self._stream(self._choices(prompts, params, rids, fixed))

    def stream(
        self,
        prompt_ids: Sequence[int],
        params: sampling_params.SamplingParams,
        *,
        request_id: str | None = None,
        suffix: infilling.Suffix | None = None,
        given: infilling.Given | None = None,
    ) -> AsyncIterator[generations.Generation]:
        """Yields each choice's text as its blocks commit; for servers, so the queue limit holds.

        Refusals of the scheduler raise at the first step. Closing the iterator aborts.
        """
        places = self.max_running_requests + self.config.max_queued_requests
        if params.n > places:
            raise errors.RequestError(
                f"n={params.n} can never fit: max_running_requests and max_queued_requests allow "
                f"{places} together",
                param="n",
            )
        fixed = infilling.infills(suffix, given, 1, self.tokenizer)
        choices = self._choices([prompt_ids], [params], [request_id or requests.new_id()], fixed)
        return streams.as_they_come(self._loop, choices, is_bounded=True)

    # Control

    def abort(self, request_id_prefix: str = "", *, abort_all: bool = False) -> int:
        """Aborts the requests whose id begins so, or all; returns how many."""
        if not request_id_prefix and not abort_all:
            return 0
        prefix = "" if abort_all else request_id_prefix
        aborted = self._loop.abort(lambda request: request.request_id.startswith(prefix))
        return aborted.result()

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False, and nothing done, while requests run."""
        return self._loop.call(self._built.core.scheduler.flush_cache).result()

    def stop_admitting(self) -> None:
        """Refuses new requests from now on; running ones go on."""
        self._loop.is_admitting = False

    def drain(self, timeout_s: float) -> bool:
        """Waits until no request is left; False when the time is up before."""
        deadline = time.monotonic() + timeout_s
        while self._built.core.requests:
            if time.monotonic() >= deadline or not self._loop.is_alive:
                return False
            time.sleep(0.02)
        return True

    def shutdown(self) -> None:
        """Stops the engine thread and gives the device's memory back."""
        self.stop_admitting()
        self._finalizer()
        self._built.runner.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # Information

    @property
    def model(self) -> loading.LoadedModel:
        """The weights being served, for inspection; freed by `shutdown`."""
        return self._built.model

    @property
    def is_alive(self) -> bool:
        return self._loop.is_alive

    def heartbeat_age_s(self) -> float:
        """Returns seconds since the engine thread last began a round."""
        return time.monotonic() - self._loop.beat_s

    def default_max_new_tokens(self, prompt_len: int, block_length: int | None = None) -> int:
        """Returns what remains of the context, the default of chat requests.

        A model that sees its whole canvas pays for all of it in every forward: there it is
        `CANVAS_TOKENS` at most, in whole blocks, which a canvas counts from the prompt's end.
        """
        block_size = block_length or self.spec.diffusion.block_size
        if self.spec.diffusion.has_canvas:
            rest = min(self.context_length, self.max_total_tokens) - prompt_len
            rest = min(rest, CANVAS_TOKENS)
            return max(1, rest // block_size * block_size or rest)
        # The pool holds whole blocks; with pages smaller than a block a rest may be left over.
        pool = self.max_total_tokens // block_size * block_size
        room = min(self.context_length, pool)
        return max(1, room - prompt_len)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of plain text."""
        if self.tokenizer is None:
            raise errors.RequestError(
                "the engine runs with skip_tokenizer_init; give input_ids", param="prompt"
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def stats(self) -> stats_lib.EngineStats:
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

    def _stream(
        self, choices: dict[str, requests.Choice]
    ) -> streams.GenerationStream[generations.Generation]:
        return streams.GenerationStream(self._loop, choices, lambda generation: generation)

    def _choices_of(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: Any,
        params: requests.Params | Sequence[requests.Params],
        rid: str | Sequence[str] | None,
        fixed: tuple[infilling.Suffixes, infilling.Givens],
    ) -> tuple[dict[str, requests.Choice], bool]:
        """Returns (choices by request id, whether one answer is wanted, not a list)."""
        prompts, is_single = self._prompt_ids(prompt, input_ids)
        rows = requests.params_per_prompt(params, len(prompts))
        rids = requests.request_ids(rid, len(prompts))
        infills = infilling.infills(*fixed, len(prompts), self.tokenizer)
        choices = self._choices(prompts, rows, rids, infills)
        return choices, is_single and len(choices) == 1

    def _choices(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[sampling_params.SamplingParams],
        rids: Sequence[str],
        infills: Sequence[infilling.Infill],
    ) -> dict[str, requests.Choice]:
        choices: dict[str, requests.Choice] = {}
        rows = zip(prompts, params, rids, infills, strict=True)
        for i, (prompt_ids, one, rid, infill) in enumerate(rows):
            full = self._complete(one, len(prompt_ids) + len(infill.suffix_ids))
            self._check_ids(
                input_ids=prompt_ids,
                stop_token_ids=full.stop_token_ids,
                suffix=infill.suffix_ids,
                given=infill.given.values(),
            )
            seed = self._random.getrandbits(requests.SEED_BITS) if full.seed is None else full.seed
            for index in range(full.n):
                request = request_lib.Request(
                    request_id=rid if full.n == 1 else f"{rid}-{index}",
                    prompt_ids=list(prompt_ids),
                    suffix_ids=list(infill.suffix_ids),
                    given=dict(infill.given),
                    sampling=full,
                    max_new_tokens=full.max_new_tokens,
                    eos_token_ids=self._built.eos_token_ids,
                    seed=requests.seed_of_choice(seed, index),
                )
                if request.request_id in choices:
                    raise errors.RequestError(
                        f"duplicate request id {request.request_id!r}", param="rid"
                    )
                choices[request.request_id] = requests.Choice(request, i, index, self.tokenizer)
        return choices

    def _complete(
        self, params: sampling_params.SamplingParams, prompt_len: int
    ) -> sampling_params.SamplingParams:
        """Returns the params with every default filled in, options checked.

        A suffix counts as prompt.
        """
        dllm = params.dllm.resolve(self._built.default_dllm)
        if dllm.algorithm not in self._built.algorithms:
            raise errors.RequestError(
                f"algorithm {dllm.algorithm!r} is not compiled; this server has "
                f"{', '.join(self._built.algorithms)} (--dllm-algorithm A,B adds more)",
                param="dllm.algorithm",
            )
        default = self._built.default_sampling
        pick = lambda value, fallback: fallback if value is None else value  # noqa: E731
        return dataclasses.replace(
            params,
            max_new_tokens=pick(
                params.max_new_tokens, self.default_max_new_tokens(prompt_len, dllm.block_length)
            ),
            temperature=pick(params.temperature, default.temperature),
            top_p=pick(params.top_p, default.top_p),
            top_k=pick(params.top_k, default.top_k),
            dllm=dllm,
        )

    def _check_ids(self, **named: Iterable[object]) -> None:
        V = self.spec.vocab_size
        for name, ids in named.items():
            for token_id in ids:
                is_id = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
                if not is_id or not 0 <= token_id < V:
                    raise errors.RequestError(
                        f"{name} holds {token_id!r}, not a token id between 0 and {V - 1}",
                        param=name,
                    )

    def _prompt_ids(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    ) -> tuple[list[list[int]], bool]:
        """Returns (one list of ids per prompt, whether a single prompt was given)."""
        if (prompt is None) == (input_ids is None):
            raise errors.RequestError("give either a prompt or input_ids", param="prompt")
        if prompt is not None:
            is_single = isinstance(prompt, str)
            texts = [prompt] if is_single else prompt
            if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
                raise errors.RequestError("prompt must be text or a list of texts", param="prompt")
            return [self.encode(text) for text in texts], is_single
        return requests.id_rows(input_ids)


def _in_order(
    choices: dict[str, requests.Choice], final: dict[str, dict[str, Any]], is_single: bool
) -> Any:
    """Returns the finished answers in the order of the prompts and their choices."""
    results = [final[request_id] for request_id in choices]
    return results[0] if is_single else results


def _dict_maker(
    choices: dict[str, requests.Choice], is_single: bool
) -> Callable[[generations.Generation], dict[str, Any]]:
    """Returns what turns streamed generations into SGLang's dicts, numbered unless single."""
    places = {request_id: place for place, request_id in enumerate(choices)}

    def make(generation: generations.Generation) -> dict[str, Any]:
        item = generation.as_dict()
        if not is_single:
            item["index"] = places[generation.request_id]
            item["prompt_index"] = generation.prompt_index
        return item

    return make
