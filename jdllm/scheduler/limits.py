"""Which requests can run at all; checked once, when a request arrives.

A request that passes can always finish alone in the pool, which is what keeps the
scheduler free of deadlock.
"""

from __future__ import annotations

import dataclasses

from jdllm import errors
from jdllm.kv_cache import prefix_cache as prefix_cache_lib
from jdllm.scheduler import buckets as buckets_lib
from jdllm.scheduler import request as request_lib


def check_sizes(
    block_size: int,
    page_size: int,
    max_running_requests: int,
    buckets: buckets_lib.Buckets,
    prefix_cache: prefix_cache_lib.PrefixCache | None,
) -> None:
    """Raises a ConfigError for sizes of a scheduler that do not go together."""
    if page_size % block_size and block_size % page_size:
        raise errors.ConfigError(f"{page_size=} and {block_size=} must divide one another")
    if buckets.block_size != block_size:
        raise errors.ConfigError(f"{buckets.block_size=} differs from {block_size=}")
    if prefix_cache is not None and prefix_cache.page_size != page_size:
        raise errors.ConfigError(f"{prefix_cache.page_size=} differs from {page_size=}")
    if not 1 <= max_running_requests <= buckets.decode_rows[-1]:
        raise errors.ConfigError(
            f"{max_running_requests=} must be between 1 and the largest decode bucket "
            f"of {buckets.decode_rows[-1]} rows"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that bound one request."""

    context_length: int
    block_size: int
    page_size: int
    num_pages: int
    has_tokenizer: bool

    def check(self, request: request_lib.Request) -> None:
        """Raises a `RequestError` if `request` could not finish alone."""
        prompt, wanted = len(request.prompt_ids), request.max_new_tokens
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
                f"the prompt has {prompt} tokens, which leaves no room in the context length of "
                f"{self.context_length}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        asked = f"the prompt has {prompt} tokens and max_new_tokens={wanted}"
        if prompt + wanted > self.context_length:
            raise errors.RequestTooLong(
                f"{asked}, together {prompt + wanted}, but the context length is "
                f"{self.context_length}; shorten the prompt or lower max_new_tokens",
                param="max_new_tokens",
                code="context_length_exceeded",
            )
        num_blocks = -(-(prompt + wanted) // self.block_size)
        needed = -(-num_blocks * self.block_size // self.page_size)
        if needed > self.num_pages:
            raise errors.RequestTooLong(
                f"{asked}, which takes {needed} KV pages, but the pool has {self.num_pages}; "
                "shorten the prompt, lower max_new_tokens or enlarge the pool",
                param="max_new_tokens",
                code="context_length_exceeded",
            )
