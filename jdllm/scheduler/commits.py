"""What the scheduler tells the engine about a request after a round."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jdllm.scheduler.batch import Frame
from jdllm.scheduler.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why and where an output ends: `finished_len` tokens are kept.

    `matched` is the stop token id (the last kept token) or the stop string (inside
    the text of the kept tokens), and None for length and abort. `message` says why a
    request was aborted.
    """

    kind: Literal["stop", "length", "abort"]
    finished_len: int
    matched: int | str | None = None
    message: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a launch gave a request: new output tokens, frames, its end, its product."""

    new_token_ids: list[int] = dataclasses.field(default_factory=list)
    frames: tuple[Frame, ...] = ()
    finish: FinishReason | None = None
    product: Any = None

    def __bool__(self) -> bool:
        has_ended = self.finish is not None or self.product is not None
        return bool(self.new_token_ids or self.frames) or has_ended


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestCommit:
    """What a request committed in a launch, without surplus; the last commit has a `finish`.

    `frames` and `product` exist for kinds that have them. The numbers are the request's totals at
    the time of the commit, since a consumer may read it much later. `nfe` counts forwards.
    """

    request: Request
    new_token_ids: list[int]
    finish: FinishReason | None
    frames: tuple[Frame, ...]
    product: Any
    num_output: int
    nfe: int
    num_blocks: int
    num_edited: int
    num_discarded: int
    num_skipped: int

    @classmethod
    def of(cls, request: Request, progress: Progress) -> RequestCommit:
        """Returns the commit of what a launch has just given a request."""
        return cls(
            request=request,
            new_token_ids=progress.new_token_ids,
            finish=progress.finish,
            frames=progress.frames,
            product=progress.product,
            num_output=len(request.output_ids),
            nfe=request.nfe,
            num_blocks=request.num_blocks,
            num_edited=request.num_edited,
            num_discarded=request.num_discarded,
            num_skipped=request.num_skipped,
        )
