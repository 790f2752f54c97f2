"""What the scheduler needs from a kind of rows, and what a kind is built from.

A kind says how running requests become launches, and what the result of a launch means for them.
The scheduler handles queue, order, ends, aborts and faults, the same for all kinds.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, Protocol, Self, runtime_checkable

from jdllm.device import facts
from jdllm.kv_cache.prefix_cache import PrefixCache
from jdllm.scheduler import live_requests
from jdllm.scheduler.batch import Bucket, Pause, RowResult, ScheduleBatch
from jdllm.scheduler.commits import Progress
from jdllm.scheduler.finish import Detokenize
from jdllm.scheduler.limits import Limits
from jdllm.scheduler.pages import RequestPages
from jdllm.scheduler.request import Request
from jdllm.scheduler.stay import Stay


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowDefaults:
    """Facts of a kind that are known before anything is built.

    `cpu_rows` and `accelerator_rows` are the default number of running rows. `most_context`
    bounds the context if the user sets none. `shares_prefixes`: K,V of a prefix can serve other
    requests. `unused_options` are options of `EngineConfig` that have no effect, and `why_unused`
    says why.
    """

    cpu_rows: int
    accelerator_rows: int
    most_context: int | None = None
    shares_prefixes: bool = False
    unused_options: tuple[str, ...] = ()
    why_unused: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowConfig:
    """What rows of any kind are built from; sizes are in tokens, requests and pages.

    `max_prefill_tokens`, `launches_ahead` and the next two concern only models that write block
    after block. `is_shifted`: the first token of a block comes from the last position before it.
    `is_causal`: K,V of a written block are those of a causal forward, which gives that token.
    """

    max_running_requests: int
    context_length: int
    block_size: int
    page_size: int
    num_pages: int
    prefill_token_budget: int
    max_prefill_tokens: int
    decode_steps: int = 1
    launches_ahead: int = 0
    has_prefix_cache: bool = False
    is_shifted: bool = False
    is_causal: bool = False
    device: facts.DeviceFacts = facts.DeviceFacts(platform="cpu", device_kind="cpu")
    detokenize: Detokenize | None = None

    def live_requests(self, cache: live_requests.Cache | None = None) -> live_requests.LiveRequests:
        """Returns live requests for a new scheduler: no request, and all pages free.

        `cache` is what the kind keeps on the device beside pages.
        """
        prefixes = PrefixCache(self.page_size) if self.has_prefix_cache else None
        pages = RequestPages(
            num_pages=self.num_pages,
            page_size=self.page_size,
            block_size=self.block_size,
            prefix_cache=prefixes,
            is_shifted=self.is_shifted or self.is_causal,
            unit=1 if self.is_causal else None,
        )
        return live_requests.LiveRequests(
            max_running=self.max_running_requests, pages=pages, cache=cache
        )

    @property
    def limits(self) -> Limits:
        """The sizes that bound one request."""
        return Limits(
            context_length=self.context_length,
            block_size=self.block_size,
            page_size=self.page_size,
            num_pages=self.num_pages,
            has_tokenizer=self.detokenize is not None,
        )


class Refusal(enum.Enum):
    """Why a waiting request cannot run now.

    `NO_ROOM`: what it needs is in use. Nobody overtakes it, because small requests would delay a
    large one forever. `NOT_READY`: it waits for something that no running request holds, such as a
    program that is being compiled. So others may go first, and it keeps its turn.
    """

    NO_ROOM = enum.auto()
    NOT_READY = enum.auto()


class Rows(Protocol):
    """Turns running requests into launches, and the results of launches into their output."""

    defaults: ClassVar[RowDefaults]
    live: live_requests.LiveRequests

    @classmethod
    def build(cls, config: RowConfig) -> Self:
        """Returns rows with the buckets that suit the device."""
        ...

    @property
    def max_rows(self) -> int:
        """The most rows that may run at once."""
        ...

    def buckets(self) -> list[Bucket]:
        """Returns every bucket that a batch may have, to be compiled."""
        ...

    def default_new_tokens(self, prompt_len: int, block_length: int | None) -> int:
        """Returns how many tokens a request may write if it sets no limit; at least 1."""
        ...

    def prepare(self, request: Request) -> None:
        """Prepares a new request; raises a `RequestError` if it could not finish even alone."""
        ...

    def admit(self, request: Request) -> Stay | Refusal:
        """Takes what a waiting request needs to run; if it cannot run now, changes nothing."""
        ...

    def plan(self) -> ScheduleBatch | Pause | None:
        """Returns the next launch, or how long to wait for it; None only if no request runs.

        Only kinds whose running rows may have nothing to launch, or whose waiting ones may not be
        ready, pause.
        """
        ...

    def apply(self, request: Request, result: RowResult) -> Progress:
        """Stores what a launch gave a row; if the row ends, also everything that outlives it."""
        ...

    def settle(self, request: Request, result: RowResult) -> None:
        """Updates the stay of a row that goes on after `apply`."""
        ...

    def steps_left(self, request: Request) -> float:
        """Returns in how many steps a running request is expected to end; infinite if unknown."""
        ...


@runtime_checkable
class CanHalve(Protocol):
    """Rows whose launches can be made smaller when memory does not suffice, and larger again."""

    def halve(self, batch: ScheduleBatch) -> bool:
        """Lowers the rows of launches like this one; returns False if that is impossible."""
        ...

    def note_good(self, batch: ScheduleBatch) -> None:
        """Notes that memory sufficed for a launch."""
        ...
