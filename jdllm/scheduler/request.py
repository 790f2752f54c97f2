"""One request as the host sees it, from arrival to its last token.

`output_ids` holds only committed tokens; `output_steps` and `output_logprobs` have one entry
for each of them, and so has `output_top` (the most probable tokens) if the request asks for it.
The block that is being denoised lies on the device, in the slot of the request's `stay`.
Preemption loses that block, but never committed tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float32, Int32

from jdllm.options import image_params, sampling_params
from jdllm.scheduler.stay import Stay


class RequestState(enum.StrEnum):
    """The state of a request; only a running request holds pages and a row."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def end_tokens(
    stop_token_ids: Collection[int], eos_token_ids: Collection[int], ignore_eos: bool
) -> tuple[int, ...]:
    """Returns the tokens that end an output: the model's unless ignored, and the request's own.

    The model's come first, because the device checks only the first few.
    """
    ends = stop_token_ids if ignore_eos else (*eos_token_ids, *stop_token_ids)
    return tuple(dict.fromkeys(ends))


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """State of one request. `sampling` has every default filled in by the engine.

    `eos_token_ids` are the model's; `sampling.stop_token_ids` the request's own.
    `banned_ids` are tokens that it never writes (its bad words). Requests of one call have the same
    `group` (see `waiting.py`). `priority_class` is the class to which its priority leads: lower
    classes go first. The scheduler sets `arrival` and `admission`, its places in the order of
    arrival and of first admission. `stay` is what the request holds while it runs.

    Only full-attention models use the next two. `suffix_ids` is a text that follows the
    written text. `given` maps places of the written text, counted from the prompt's end, to
    tokens that are fixed.

    Only image models use `image`, what kind of image is wanted, `num_frames`, how many frames have
    been reported, `num_skipped`, how many steps have left out most of the model since it last
    began, and the times (of `time.monotonic`) at which everything that precedes the first step was
    there, and the last step was done.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: sampling_params.SamplingParams
    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    seed: int = 0
    suffix_ids: list[int] = dataclasses.field(default_factory=list)
    given: dict[int, int] = dataclasses.field(default_factory=dict)
    image: image_params.ImageParams | None = None
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    group: object = dataclasses.field(default_factory=object)
    priority_class: float = 0
    arrival: int = 0
    admission: int | None = None
    state: RequestState = RequestState.WAITING
    output_ids: list[int] = dataclasses.field(default_factory=list)
    output_steps: list[int] = dataclasses.field(default_factory=list)
    output_logprobs: list[float] = dataclasses.field(default_factory=list)
    output_top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    stay: Stay | None = None
    cached_tokens: int = 0
    nfe: int = 0
    num_blocks: int = 0
    num_edited: int = 0
    num_discarded: int = 0
    num_frames: int = 0
    num_skipped: int = 0
    began_s: float | None = None
    denoised_s: float | None = None
    num_preemptions: int = 0
    first_scheduled_s: float | None = None

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the output: the model's unless ignored, and the request's own."""
        sampling = self.sampling
        return end_tokens(sampling.stop_token_ids, self.eos_token_ids, sampling.ignore_eos)

    def rank(self) -> tuple[float, int]:
        """Returns the place among requests that ran; the highest is preempted first.

        By admission, not by arrival: a question that came after a long list, and ran before most
        of it, must not be preempted for each member of that list again.
        """
        assert self.admission is not None, f"request {self.request_id} has never run"
        return self.priority_class, self.admission

    @property
    def held(self) -> Stay:
        """The stay of a running request."""
        assert self.stay is not None, f"request {self.request_id} is not running"
        return self.stay

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

    def extend(
        self,
        tokens: Int32[np.ndarray, " T"],
        steps: Int32[np.ndarray, " T"],
        logprobs: Float32[np.ndarray, " T"],
        top: Sequence[list[tuple[int, float]]] = (),
    ) -> list[int]:
        """Appends committed tokens with what is known of them; returns the tokens."""
        new = tokens.tolist()
        self.output_ids += new
        self.output_steps += steps.tolist()
        self.output_logprobs += logprobs.tolist()
        self.output_top += top
        return new

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of the output."""
        for kept in (self.output_ids, self.output_steps, self.output_logprobs, self.output_top):
            del kept[length:]

    def whole_len(self, block_size: int) -> int:
        """Returns how many committed tokens fill whole blocks."""
        return self.num_tokens // block_size * block_size
