"""An engine that writes given ids in launches of given sizes, with the real rules of ends and text.

What leaves it is made as in the real engine: `finish` cuts the output, and `requests.Choice` turns
it into text, which holds back what may change. Token i has the log-probability -i / 8.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence

import numpy as np
from support import fake_engine

from jdllm.engine import generations, loop, requests
from jdllm.engine.tokenizer import Tokenizer
from jdllm.options import sampling_params
from jdllm.scheduler import commits, finish
from jdllm.scheduler.request import Request


class WrittenEngine(fake_engine.FakeEngine):
    """Choice i writes `outputs[i]`; launch k gives each choice `launches[k]` tokens, cyclically."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        outputs: Sequence[list[int]],
        launches: Sequence[int],
        *,
        eos_token_ids: tuple[int, ...] = (),
    ):
        model = dataclasses.replace(fake_engine.SPEC, vocab_size=len(tokenizer))
        super().__init__(model_spec=model)
        self.tokenizer = tokenizer
        self._outputs, self._launches, self._eos = outputs, launches, eos_token_ids

    async def stream(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[sampling_params.SamplingParams],
        *,
        request_ids: Sequence[str],
        suffix: Sequence[int] = (),
        priority: int | None = None,
    ) -> AsyncGenerator[generations.Generation, None]:
        rows = [self._row(prompts[0], params[0], index) for index in range(params[0].n)]
        for several in itertools.zip_longest(*rows):
            for one in several:
                if one is not None:
                    yield one

    def _row(
        self, prompt_ids: list[int], params: sampling_params.SamplingParams, index: int
    ) -> Iterator[generations.Generation]:
        ids = self._outputs[index]
        request = Request(
            request_id=f"r-{index}",
            prompt_ids=prompt_ids,
            sampling=params,
            max_new_tokens=min(params.max_new_tokens or len(ids), len(ids)),
            eos_token_ids=self._eos,
        )
        choice = requests.Choice(request, 0, index, self.tokenizer)
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=False)
        for size in itertools.cycle(self._launches):
            new = self._extend(request, ids, size, params.top_logprobs)
            end = finish.check_request(request, len(new), decode)
            if end is not None:
                request.truncate(end.finished_len)
            progress = commits.Progress(new_token_ids=new, finish=end)
            event = loop.TokensEvent(commits.RequestCommit.of(request, progress))
            yield choice.update(event)
            if end is not None:
                return

    def _extend(self, request: Request, ids: list[int], size: int, num_top: int) -> list[int]:
        begin = len(request.output_ids)
        new = ids[begin : begin + size]
        logprobs = -np.arange(begin, begin + len(new), dtype=np.float32) / 8
        vocabulary = len(self.tokenizer)
        top = [[((t + k) % vocabulary, -float(k)) for k in range(num_top)] for t in new]
        tokens = np.asarray(new, np.int32)
        return request.extend(tokens, np.ones_like(tokens), logprobs, top)
