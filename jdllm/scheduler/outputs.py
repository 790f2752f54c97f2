"""What the scheduler tells the engine about a request after a round."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jdllm.scheduler import request as request_lib


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why and where an output ends: `finished_len` tokens are kept.

    `matched` is the stop token id (the last kept token) or the stop string (inside
    the text of the kept tokens); None for length and abort. `message` says why a
    request was aborted.
    """

    kind: Literal["stop", "length", "abort"]
    finished_len: int
    matched: int | str | None = None
    message: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Tokens a request committed in a round, surplus dropped; `finish` on the last one."""

    request: request_lib.Request
    new_token_ids: list[int]
    finish: FinishReason | None = None
