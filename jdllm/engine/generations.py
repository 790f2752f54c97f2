"""What the engine tells its callers about a request, in SGLang's shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdllm.engine.loop import TokensEvent
    from jdllm.options import sampling_params
    from jdllm.scheduler.batch import Frame
    from jdllm.scheduler.commits import FinishReason
    from jdllm.scheduler.request import Request

FAULT_STATUS = 500
MAX_FAULT_MESSAGE = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One choice so far. `text` and `output_ids` only grow.

    `delta_text` and `delta_ids` are what this event added; `finish_reason` is None
    until the last event of the choice. `frames` are what the output looked like after each step
    since the event before (`value` is a `TextFrame`), for requests that ask for that.
    """

    request_id: str
    index: int
    prompt_index: int
    text: str
    delta_text: str
    output_ids: list[int]
    delta_ids: list[int]
    finish_reason: dict[str, Any] | None
    meta_info: dict[str, Any]
    frames: tuple[Frame, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns SGLang's `/generate` object."""
        return {"text": self.text, "output_ids": self.output_ids, "meta_info": self.meta_info}


class Collector:
    """Brings the generations of one call of `generate` into the shape of its answer.

    The answer is SGLang's dict for a single choice, and a list of dicts for several. The list
    has the order of `request_ids`: the order of the prompts, then of their choices.
    """

    def __init__(self, request_ids: Iterable[str], *, is_single: bool):
        self._places = {request_id: place for place, request_id in enumerate(request_ids)}
        self._is_single = is_single and len(self._places) == 1
        self._finals: dict[str, dict[str, Any]] = {}

    def add(self, generation: Generation) -> None:
        """Keeps a generation if it is the last one of its choice."""
        if generation.finish_reason is not None:
            self._finals[generation.request_id] = generation.as_dict()

    def answer(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Returns the whole answer, once every choice has ended."""
        results = [self._finals[request_id] for request_id in self._places]
        return results[0] if self._is_single else results

    def part(self, generation: Generation) -> dict[str, Any]:
        """Returns what a stream yields for a generation; with its number, if there are several."""
        item = generation.as_dict()
        if generation.frames:
            item["frames"] = [
                {"step": one.step, **dataclasses.asdict(one.value)} for one in generation.frames
            ]
        if not self._is_single:
            item["index"] = self._places[generation.request_id]
            item["prompt_index"] = generation.prompt_index
        return item


def finish_dict(finish: FinishReason | None) -> dict[str, Any] | None:
    """Returns SGLang's `finish_reason` object, None while the request runs.

    An abort that somebody asked for has no `status_code`; an end by a fault has one, as in SGLang.
    """
    if finish is None:
        return None
    match finish.kind:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": finish.finished_len}
        case "abort":
            if finish.message is None:
                return {"type": "abort", "message": "aborted"}
            fault = {"status_code": FAULT_STATUS, "err_type": "InternalServerError"}
            return {"type": "abort", "message": finish.message[:MAX_FAULT_MESSAGE], **fault}
    raise AssertionError(f"unknown finish kind {finish.kind!r}")


def prompt_only(
    request_id: str,
    place: tuple[int, int],
    prompt_tokens: int,
    params: sampling_params.SamplingParams,
    latency_s: float,
) -> Generation:
    """Returns the end of a choice that writes no tokens; `place` is (prompt, choice).

    Nothing runs for it, so there is nothing that could be cached or queued.
    """
    finish = {"type": "length", "length": 0}
    dllm = {
        **dict.fromkeys(("nfe", "blocks", "edited_tokens", "discarded_tokens"), 0),
        "tpf": 0.0,
        "algorithm": params.dllm.algorithm,
        "threshold": params.dllm.threshold,
    }
    return Generation(
        request_id=request_id,
        prompt_index=place[0],
        index=place[1],
        text="",
        delta_text="",
        output_ids=[],
        delta_ids=[],
        finish_reason=finish,
        meta_info={
            "id": request_id,
            "finish_reason": finish,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 0,
            "cached_tokens": 0,
            "e2e_latency": latency_s,
            "queue_time": 0.0,
            "weight_version": "default",
            "nfe": 0,
            "tpf": 0.0,
            "dllm": dllm,
            **({"step_map": []} if params.return_step_map else {}),
        },
    )


def meta_info(
    request: Request,
    event: TokensEvent,
    finish_reason: dict[str, Any] | None,
) -> dict[str, Any]:
    """Returns SGLang's `meta_info` with the dLLM statistics beside it.

    NFE counts the decode forwards that this request took part in; TPF is completion tokens
    per NFE. A suffix counts as prompt. Times are seconds. `output_token_logprobs`,
    `output_top_logprobs` and `step_map` have one entry per output token and are there only if the
    request asks for them.
    """
    tpf = event.commit.num_output / event.commit.nfe if event.commit.nfe else 0.0
    started = request.first_scheduled_s
    dllm = {
        "nfe": event.commit.nfe,
        "tpf": round(tpf, 4),
        "blocks": event.commit.num_blocks,
        "edited_tokens": event.commit.num_edited,
        "discarded_tokens": event.commit.num_discarded,
        "algorithm": request.sampling.dllm.algorithm,
        "threshold": request.sampling.dllm.threshold,
    }
    if request.sampling.dllm.cache_mode is not None:
        # Some cache modes are approximate, so the answer always says which one was used.
        dllm["cache_mode"] = request.sampling.dllm.cache_mode
    count = event.commit.num_output
    asked: dict[str, Any] = {}
    if request.sampling.return_logprob:
        # SGLang's triple; the text of a token is left out.
        logprobs = zip(request.output_logprobs[:count], request.output_ids, strict=False)
        asked["output_token_logprobs"] = [(value, token, None) for value, token in logprobs]
    if request.sampling.top_logprobs:
        asked["output_top_logprobs"] = [
            [(value, token, None) for token, value in best] for best in request.output_top[:count]
        ]
    if request.sampling.return_step_map:
        asked["step_map"] = request.output_steps[:count]
    return {
        "id": request.request_id,
        "finish_reason": finish_reason,
        "prompt_tokens": len(request.prompt_ids) + len(request.suffix_ids),
        "completion_tokens": event.commit.num_output,
        "cached_tokens": request.cached_tokens,
        "e2e_latency": event.at_s - request.arrival_s,
        "queue_time": (event.at_s if started is None else started) - request.arrival_s,
        "weight_version": "default",
        "nfe": event.commit.nfe,
        "tpf": dllm["tpf"],
        "dllm": dllm,
        **asked,
    }
