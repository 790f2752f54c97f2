"""Requests on the caller's side: ids, seeds and parameters go in, generations come out.

`Choice` turns the events of one request into cumulative text. The functions bring the forms
that callers may use (dicts, one value for all prompts, lists) into one form.
"""

from __future__ import annotations

import dataclasses
import math
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from jdllm import errors, value_checks
from jdllm.engine import detokenizer, generations
from jdllm.engine.loop import Event, FaultEvent
from jdllm.engine.tokenizer import Tokenizer
from jdllm.options import sampling_params
from jdllm.options.config import EngineConfig
from jdllm.scheduler.request import Request

P = TypeVar("P")
Prompt = str | Sequence[int]  # text, or token ids
Params = sampling_params.SamplingParams | Mapping[str, object] | None

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's default for /generate and Engine.generate
SEED_BITS = 64
MAX_PRIORITY = (1 << 63) - 1


class EngineFault(RuntimeError):
    """The launch that ran the request failed on the device."""


class Choice:
    """One request on the caller's side: turns its events into generations."""

    def __init__(
        self,
        request: Request,
        prompt_index: int,
        index: int,
        tokenizer: Tokenizer | None,
    ):
        self.request = request
        self.has_ended = False
        self._prompt_index = prompt_index
        self._index = index
        self._num_shown = 0
        self._detokenizer = (
            None if tokenizer is None else detokenizer.Detokenizer(tokenizer, request.sampling)
        )

    def update(self, event: Event) -> generations.Generation:
        """Returns the generation after this event; a fault raises EngineFault."""
        if isinstance(event, FaultEvent):
            raise EngineFault(event.message)
        output_ids = self.request.output_ids[: event.commit.num_output]
        finish = event.commit.finish
        delta_text = text = ""
        if self._detokenizer is not None:
            delta_text = self._detokenizer.update(output_ids, finish)
            text = self._detokenizer.text
        delta_ids = output_ids[self._num_shown :]
        self._num_shown = len(output_ids)
        reason = generations.finish_dict(finish)
        self.has_ended = reason is not None
        return generations.Generation(
            request_id=self.request.request_id,
            index=self._index,
            prompt_index=self._prompt_index,
            text=text,
            delta_text=delta_text,
            output_ids=output_ids,
            delta_ids=delta_ids,
            finish_reason=reason,
            meta_info=generations.meta_info(self.request, event, reason),
            frames=event.commit.frames,
        )


def as_params(params: Params) -> sampling_params.SamplingParams:
    """Returns the params of one prompt, which may be a dict or None."""
    if params is None:
        return sampling_params.SamplingParams()
    if isinstance(params, Mapping):
        return sampling_params.SamplingParams.from_mapping(params)
    return params


def with_length(params: Params) -> sampling_params.SamplingParams:
    """Returns the params of one prompt; without a length they get SGLang's default."""
    made = as_params(params)
    if made.max_new_tokens is None:
        return dataclasses.replace(made, max_new_tokens=DEFAULT_MAX_NEW_TOKENS)
    return made


def refuse_steps(params: Iterable[sampling_params.SamplingParams]) -> None:
    """Raises if one of them asks to see its steps, where only whole answers are returned."""
    if any(one.shows_steps for one in params):
        raise errors.RequestError(
            "stream_mode=denoise shows the steps of a stream: it needs stream=True",
            param="dllm.stream_mode",
        )


def seed_of_choice(seed: int, index: int) -> int:
    """Returns the seed of choice `index`; choice 0 has the request's own."""
    seed %= 1 << SEED_BITS
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0])


def priority_class(priority: int | None, config: EngineConfig) -> float:
    """Returns the class of a request with this priority; lower classes are admitted first."""
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        raise errors.RequestError("priority must be an integer", param="priority")
    if not config.enable_priority_scheduling:
        if priority:
            raise errors.RequestError(
                "priority has no effect on this server; leave it out, or start the server with "
                "--enable-priority-scheduling",
                param="priority",
            )
        return 0
    if priority is None:
        return math.inf  # after every request that has one
    if not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
        raise errors.RequestError("priority must be a signed 64-bit integer", param="priority")
    return priority if config.schedule_low_priority_values_first else -priority


def best_priority(config: EngineConfig) -> int | None:
    """Returns the priority of what must not wait for others; None where there are no priorities."""
    if not config.enable_priority_scheduling:
        return None
    return -MAX_PRIORITY - 1 if config.schedule_low_priority_values_first else MAX_PRIORITY


def new_id() -> str:
    return uuid.uuid4().hex


def choice_id(name: str, count: int, index: int) -> str:
    """Returns the id of a choice; the only choice of a prompt has the prompt's own."""
    return name if count == 1 else f"{name}-{index}"


def request_ids(rid: str | Sequence[str] | None, count: int) -> list[str]:
    if rid is None:
        return [new_id() for _ in range(count)]
    ids = [rid] if isinstance(rid, str) else list(rid)
    if len(ids) != count:
        raise errors.RequestError(f"{len(ids)} request ids for {count} prompts", param="rid")
    return ids


def one_each(params: P | Sequence[P], count: int) -> Sequence[P]:
    """Returns the params of each of `count` prompts; a single value holds for all of them."""
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise errors.RequestError(
            f"{len(params)} sampling_params for {count} prompts", param="sampling_params"
        )
    return params


def params_per_prompt(
    params: Params | Sequence[Params],
    count: int,
    convert: Callable[[Params], sampling_params.SamplingParams] = with_length,
) -> list[sampling_params.SamplingParams]:
    """Returns one SamplingParams per prompt, converted from each or from the one for all."""
    if not isinstance(params, Sequence):
        return [convert(params)] * count
    return [convert(one) for one in one_each(params, count)]


def prompt_rows(prompts: str | Sequence[int] | Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns a list of prompts; `prompts` may be one, as text or as ids."""
    if isinstance(prompts, str):
        return [prompts]
    is_ids = len(prompts) > 0 and isinstance(prompts[0], int | float | np.integer)
    # A cast: the first element decides, which no checker follows.
    return typing.cast(Sequence[Prompt], [prompts] if is_ids else prompts)


def id_rows(
    input_ids: Sequence[int] | Sequence[Sequence[int]] | Int[np.ndarray, "*B T"],
) -> tuple[list[list[int]], bool]:
    """Returns (ids of each prompt, whether a single prompt was given)."""
    # Any: callers may pass anything here, and the checks below decide.
    rows: Any = input_ids.tolist() if isinstance(input_ids, np.ndarray) else input_ids
    if not isinstance(rows, list | tuple):
        raise errors.RequestError(
            f"input_ids must be a list of ids or of lists, got {errors.quote(rows)}",
            param="input_ids",
        )
    nested = [isinstance(row, list | tuple | np.ndarray) for row in rows]
    if any(nested) and not all(nested):
        raise errors.RequestError(
            "input_ids mixes ids and lists; give one list of ids, or one list per prompt",
            param="input_ids",
        )
    is_single = not any(nested)
    rows = [rows] if is_single else rows
    return [whole_ids(row) for row in rows], is_single


def whole_ids(row: Sequence[Any] | np.ndarray) -> list[Any]:
    """Returns the ids of a prompt, 8.0 as 8; what is no number stays as it is."""
    ids = row.tolist() if isinstance(row, np.ndarray) else list(row)
    # Most rows have no float, and a look at their types is faster than one at each id.
    return [value_checks.whole(one) for one in ids] if float in set(map(type, ids)) else ids
