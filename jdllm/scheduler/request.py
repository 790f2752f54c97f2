"""One request as the host sees it, from arrival to its last token.

`output_ids` holds committed tokens only; `output_steps` and `output_logprobs` go with
it. The block being denoised lives on the device, in the row state of `slot`, and vanishes
on preemption; committed tokens never do.
`context_len` is the number of leading tokens of `token_ids` whose K,V in `pages` is final,
as far as the host knows: a launch in flight may be ahead of it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from collections.abc import Collection

import numpy as np

from jdllm import sampling_params
from jdllm.kv_cache import prefix_cache


class RequestState(enum.StrEnum):
    """Where a request stands; only a running one holds pages and a row."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def end_tokens(
    stop_token_ids: Collection[int], eos_token_ids: Collection[int], ignore_eos: bool
) -> tuple[int, ...]:
    """Returns the tokens that end an output: the model's unless ignored, and the request's own.

    The model's come first: a device that looks for a few of them looks for those.
    """
    ends = stop_token_ids if ignore_eos else (*eos_token_ids, *stop_token_ids)
    return tuple(dict.fromkeys(ends))


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """State of one request. `sampling` has every default filled in by the engine.

    `eos_token_ids` are the model's; `sampling.stop_token_ids` the request's own.
    `arrival` is its place in the order of arrival, set by the scheduler; `epoch` counts
    how often it gave up its row, so that results of an earlier stay are known as stale;
    `prefix_nodes` are the prefix-cache nodes that own its first pages.

    Full-attention models only: `suffix_ids` is a text that follows what is written, `given`
    maps places in it, from the prompt's end, to tokens that are fixed. The scheduler makes
    `canvas_ids` of them, the whole canvas with -1 where tokens are to be written, and
    `canvas_end`, where the suffix begins. `num_settled` counts the tokens that the row has
    reported since it began.

    `tokens_per_step`: what the last launch of this stay brought, 0 where nothing is known.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: sampling_params.SamplingParams
    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    suffix_ids: list[int] = dataclasses.field(default_factory=list)
    given: dict[int, int] = dataclasses.field(default_factory=dict)
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    arrival: int = 0
    state: RequestState = RequestState.WAITING
    output_ids: list[int] = dataclasses.field(default_factory=list)
    output_steps: list[int] = dataclasses.field(default_factory=list)
    output_logprobs: list[float] = dataclasses.field(default_factory=list)
    slot: int | None = None
    is_decoding: bool = False
    epoch: int = 0
    context_len: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    prefix_nodes: list[prefix_cache.Node] = dataclasses.field(default_factory=list)
    canvas_ids: list[int] = dataclasses.field(default_factory=list)
    canvas_end: int = 0
    num_settled: int = 0
    tokens_per_step: float = 0.0
    cached_tokens: int = 0
    nfe: int = 0
    num_blocks: int = 0
    num_edited: int = 0
    num_discarded: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the output: the request's own, and the model's unless ignored."""
        sampling = self.sampling
        return end_tokens(sampling.stop_token_ids, self.eos_token_ids, sampling.ignore_eos)

    @property
    def steps_left(self) -> float:
        """Steps until the output has its length, at the pace of the last launch."""
        left = self.max_new_tokens - len(self.output_ids)
        return left / self.tokens_per_step if self.tokens_per_step else math.inf

    @property
    def token_ids(self) -> list[int]:
        """Prompt and committed output."""
        return self.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        """Length of prompt and committed output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns `token_ids[start:stop]` without building the whole list."""
        split = len(self.prompt_ids)
        head = self.prompt_ids[start:stop]
        return head + self.output_ids[max(0, start - split) : max(0, stop - split)]

    def extend(self, tokens: np.ndarray, steps: np.ndarray, logprobs: np.ndarray) -> list[int]:
        """Appends committed tokens and what goes with them; returns the tokens."""
        new = tokens.tolist()
        self.output_ids += new
        self.output_steps += steps.tolist()
        self.output_logprobs += logprobs.tolist()
        return new

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of the output."""
        for kept in (self.output_ids, self.output_steps, self.output_logprobs):
            del kept[length:]

    def whole_len(self, block_size: int) -> int:
        """Returns how many committed tokens fill whole blocks."""
        return self.num_tokens // block_size * block_size
