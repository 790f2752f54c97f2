"""Which requests can run at all; checked once, when a request arrives.

A request that passes can always finish alone in the pool; this keeps the scheduler free of
deadlock.
"""

from __future__ import annotations

import dataclasses

from jdllm import errors
from jdllm.scheduler.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that bound one request."""

    context_length: int
    block_size: int
    page_size: int
    num_pages: int
    has_tokenizer: bool

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def _most(self) -> str:
        return errors.maximum_context(self.context_length)

    def check(self, request: Request) -> None:
        """Raises a `RequestError` if `request` is empty or exceeds the context."""
        prompt, wanted = len(request.prompt_ids), request.max_new_tokens
        total = prompt + wanted + len(request.suffix_ids)
        if prompt < 1:
            raise errors.RequestError("the prompt is empty", param="prompt")
        if wanted < 1:
            raise errors.RequestError(
                f"max_new_tokens={wanted} must be at least 1", param="max_new_tokens"
            )
        if request.sampling.stop and not self.has_tokenizer:
            raise errors.RequestError(
                "stop strings need a tokenizer, which this engine runs without; use stop_token_ids",
                param="stop",
            )
        if prompt >= self.context_length:
            raise errors.RequestTooLong(
                f"{self._most}, but the prompt has {prompt} tokens, which leaves no room to "
                "write; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        if total > self.context_length:
            raise errors.RequestTooLong(
                f"{self._most}, but {_asked(request)}, together {total}; shorten the prompt "
                "or lower max_new_tokens",
                param="max_new_tokens",
                code="context_length_exceeded",
            )

    def check_pages(self, request: Request, num_tokens: int) -> None:
        """Raises a `RequestError` if the pool cannot hold `num_tokens` tokens of `request`."""
        needed = -(-num_tokens // self.page_size)
        if needed > self.num_pages:
            raise errors.RequestTooLong(
                f"{self._most} if the KV pool can hold them, but {_asked(request)}, which takes "
                f"{needed} KV pages, and the pool has {self.num_pages}; shorten the prompt, lower "
                "max_new_tokens or enlarge the pool",
                param="max_new_tokens",
                code="context_length_exceeded",
            )


def check_open_ended(request: Request) -> None:
    """Raises a `RequestError` for options that need a model that sees later tokens."""
    for name, value in (("suffix", request.suffix_ids), ("given", request.given)):
        if value:
            raise errors.RequestError(
                f"{name} needs a model with full attention; this one writes block after block "
                "and sees no later token",
                param=name,
            )


def check_given(request: Request) -> None:
    """Raises a `RequestError` for given tokens outside the positions to be written."""
    for place in request.given:
        if not 0 <= place < request.max_new_tokens:
            raise errors.RequestError(
                f"given names place {place}, but max_new_tokens={request.max_new_tokens} makes "
                f"places 0 to {request.max_new_tokens - 1}",
                param="given",
            )


def _asked(request: Request) -> str:
    suffix = f", the suffix {len(request.suffix_ids)}," if request.suffix_ids else ""
    return (
        f"the prompt has {len(request.prompt_ids)} tokens{suffix} and "
        f"max_new_tokens={request.max_new_tokens}"
    )


def check_schedule(request: Request, written: int, most_steps: int) -> None:
    """Raises unless a fixed number of steps is within bounds and divides among whole blocks."""
    dllm = request.sampling.dllm
    if dllm.steps is not None and dllm.steps > most_steps:
        raise errors.RequestError(
            f"dllm.steps={dllm.steps} exceeds the context length of {most_steps}",
            param="dllm.steps",
        )
    if dllm.block_length is None or (not dllm.writes_whole_blocks and dllm.steps is None):
        return
    if dllm.writes_whole_blocks and written % dllm.block_length:
        why = "before a suffix" if request.suffix_ids else "up to the end of context or pool"
        raise errors.RequestError(
            f"max_new_tokens={request.max_new_tokens} makes {written} tokens to write {why}, but "
            f"{dllm.algorithm} writes whole blocks of dllm.block_length={dllm.block_length}; "
            "change one of them",
            param="max_new_tokens",
        )
    num_blocks = -(-written // dllm.block_length)
    if dllm.steps is not None and dllm.steps % num_blocks:
        raise errors.RequestError(
            f"dllm.steps={dllm.steps} must be a multiple of the {num_blocks} blocks of "
            f"dllm.block_length={dllm.block_length} that max_new_tokens={request.max_new_tokens} "
            "makes",
            param="dllm.steps",
        )
