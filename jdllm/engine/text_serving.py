"""What the server asks of an engine that writes text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol

from jdllm import spec
from jdllm.engine import generations, serving, tokenizer
from jdllm.engine.stats import EngineStats
from jdllm.options import sampling_params


class TextServing(serving.Serving, Protocol):
    """An engine that writes text: `Engine`, or replicas of it in other processes."""

    @property
    def output_modality(self) -> Literal["text"]: ...

    @property
    def spec(self) -> spec.ModelSpec: ...

    @property
    def tokenizer(self) -> tokenizer.Tokenizer | None:
        """The tokenizer; None with `skip_tokenizer_init`."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    def stats(self) -> EngineStats: ...

    def default_max_new_tokens(self, prompt_len: int) -> int:
        """Returns how many tokens a request writes that sets no limit, 1 or more."""
        ...

    def check_places(self, num_choices: int, num_prompts: int = 1) -> None:
        """Raises if so many choices can never run and wait, or `QueueFull` if they cannot now."""
        ...

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[sampling_params.SamplingParams],
        *,
        request_ids: Sequence[str],
        suffix: Sequence[int] = (),
        priority: int | None = None,
    ) -> AsyncGenerator[generations.Generation, None]:
        """Yields the generations of all prompts as they come, until each choice has ended.

        The engine takes all prompts or none: a `RequestError` comes before the first generation.
        Closing the iterator aborts what has not ended.
        """
        ...
