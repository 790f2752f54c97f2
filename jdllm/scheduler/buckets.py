"""The shapes that are compiled at start-up; every launch is padded to one of them.

Few, because each costs compile time: decode launches differ in rows, prefill launches in packed
tokens with one width of page tables, canvas launches in rows and in whether canvases are short,
launches of one whole canvas in tokens.
"""

from __future__ import annotations

import bisect
import dataclasses

from jdllm import errors
from jdllm.scheduler import batch as batch_lib

# A launch of fewer tokens takes hardly less time on a GPU: it reads all weights, too.
FEW_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Ascending sizes: rows of a decode launch, tokens and rows of a prefill launch."""

    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    prefill_rows: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("decode_rows", "prefill_tokens"):
            _check_ascending(name, getattr(self, name))
        if self.block_size < 1 or self.prefill_rows < 1:
            raise errors.ConfigError(
                f"{self.block_size=} and {self.prefill_rows=} must be positive"
            )
        if any(tokens % self.block_size for tokens in self.prefill_tokens):
            raise errors.ConfigError(
                f"{self.prefill_tokens=} must be multiples of {self.block_size=}"
            )

    @property
    def max_rows(self) -> int:
        return self.decode_rows[-1]

    @classmethod
    def default(
        cls,
        max_running_requests: int,
        prefill_token_budget: int,
        block_size: int,
        *,
        padding_is_cheap: bool = False,
    ) -> Buckets:
        """Builds powers of two up to the row limit, and the budget with its halves.

        Halves go down to `FEW_TOKENS`; a budget too small for one has a quarter. Where
        `padding_is_cheap` (a GPU, bound by the weights it reads), only every other power is
        there for up to `FEW_TOKENS`.
        """
        powers = [1 << i for i in range(max_running_requests.bit_length())]
        if padding_is_cheap:
            powers = [
                rows
                for i, rows in enumerate(powers)
                if i % 2 == 0 or rows * block_size > FEW_TOKENS
            ]
        sizes = [max(1, prefill_token_budget // block_size)]  # in blocks
        while sizes[-1] > 1 and sizes[-1] * block_size >= 2 * FEW_TOKENS:
            sizes.append(sizes[-1] // 2)
        if len(sizes) == 1:
            sizes.append(max(1, sizes[0] // 4))
        return cls(
            decode_rows=tuple(sorted({*powers, max_running_requests})),
            prefill_tokens=tuple(sorted({blocks * block_size for blocks in sizes})),
            prefill_rows=max_running_requests,
            block_size=block_size,
        )

    def all(self) -> list[batch_lib.Bucket]:
        """Returns every bucket, to be compiled."""
        prefill = [self.prefill(1, tokens) for tokens in self.prefill_tokens]
        return prefill + [self.decode(rows) for rows in self.decode_rows]

    def decode(self, rows: int) -> batch_lib.Bucket:
        """Returns the smallest bucket of `rows` rows of one block each."""
        rows = _smallest(self.decode_rows, rows, "rows")
        return batch_lib.Bucket(
            phase=batch_lib.Phase.DECODE, rows=rows, tokens=rows * self.block_size
        )

    def prefill(self, rows: int, tokens: int) -> batch_lib.Bucket:
        """Returns the smallest bucket that holds `tokens` tokens of `rows` requests."""
        _smallest((self.prefill_rows,), rows, "rows")
        return batch_lib.Bucket(
            phase=batch_lib.Phase.PREFILL,
            rows=self.prefill_rows,
            tokens=_smallest(self.prefill_tokens, tokens, "tokens"),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasBuckets:
    """Ascending rows of a canvas launch; `tokens` of one forward of all of them.

    `row_tokens` is what the longest canvas takes of these. The other two are there because a launch
    holds the layers once for each size of a forward, and XLA prepares every kernel of a launch for
    each run (LLaDA-8B, 32 layers: 1 to 2 ms of the host for each size, where a forward of few
    tokens takes 5). `short_row_tokens`: canvases that together take no more than that for each row
    of the bucket have launches of their own, without the sizes that only longer ones need; 0: none.
    `whole_tokens`, ascending, are the sizes of launches of one row that forward nothing but its
    whole canvas; they hold the layers once. Nothing hides that time for the first launch of a
    request. None: every launch is one of the others.
    """

    rows: tuple[int, ...]
    tokens: int
    row_tokens: int
    short_row_tokens: int = 0
    whole_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ascending("rows", self.rows)
        if not 1 <= self.row_tokens <= self.tokens:
            raise errors.ConfigError(
                f"{self.tokens=} of a forward must hold the longest canvas of {self.row_tokens=}"
            )
        lengths = (self.tokens, self.row_tokens, self.short_row_tokens)
        if any(length % batch_lib.CANVAS_ALIGNMENT for length in lengths):
            raise errors.ConfigError(
                f"{self.tokens=}, {self.row_tokens=} and {self.short_row_tokens=} must be "
                f"multiples of {batch_lib.CANVAS_ALIGNMENT}"
            )
        if self.whole_tokens:
            _check_ascending("whole_tokens", self.whole_tokens)
            if self.whole_tokens[-1] < self.row_tokens:
                raise errors.ConfigError(
                    f"{self.whole_tokens=} must hold the longest canvas of {self.row_tokens=}"
                )

    @property
    def max_rows(self) -> int:
        return self.rows[-1]

    @classmethod
    def default(
        cls,
        max_running_requests: int,
        token_budget: int,
        context_length: int,
        *,
        short_row_tokens: int = 0,
        whole_tokens: tuple[int, ...] = (),
    ) -> CanvasBuckets:
        """Builds powers of four up to the row limit; a forward of the budget, or of one context."""
        powers = [1 << i for i in range(0, max_running_requests.bit_length(), 2)]
        row_tokens = batch_lib.packed_len(context_length)
        tokens = max(batch_lib.packed_len(token_budget), row_tokens)
        return cls(
            rows=tuple(sorted({*powers, max_running_requests})),
            tokens=min(tokens, max_running_requests * row_tokens),
            row_tokens=row_tokens,
            short_row_tokens=short_row_tokens,
            whole_tokens=whole_tokens,
        )

    def all(self) -> list[batch_lib.Bucket]:
        """Returns every bucket, to be compiled."""
        whole = [self.whole_canvas(tokens) for tokens in self.whole_tokens]
        windows = [self.canvas(n, tokens) for n in self.rows for tokens in self._tokens_of(n)]
        return windows + whole

    def canvas(self, rows: int, tokens: int) -> batch_lib.Bucket:
        """Returns the smallest bucket of `rows` canvases that take `tokens`."""
        rows = _smallest(self.rows, rows, "rows")
        return batch_lib.Bucket(
            phase=batch_lib.Phase.CANVAS,
            rows=rows,
            tokens=_smallest(self._tokens_of(rows), tokens, "tokens"),
        )

    def _tokens_of(self, rows: int) -> tuple[int, ...]:
        """Returns the tokens of the buckets of `rows`: of short canvases, and of any."""
        short, most = rows * self.short_row_tokens, min(self.tokens, rows * self.row_tokens)
        # Less than half: at least two sizes are left out.
        return (short, most) if 0 < 2 * short < most else (most,)

    def whole_canvas(self, tokens: int) -> batch_lib.Bucket:
        """Returns the smallest bucket of one canvas of `tokens` that is forwarded as a whole."""
        return batch_lib.Bucket(
            phase=batch_lib.Phase.CANVAS,
            rows=1,
            tokens=_smallest(self.whole_tokens, tokens, "tokens"),
            is_whole=True,
        )


def _check_ascending(name: str, sizes: tuple[int, ...]) -> None:
    if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise errors.ConfigError(f"{name}={sizes} must be positive and ascending")


def _smallest(sizes: tuple[int, ...], wanted: int, name: str) -> int:
    index = bisect.bisect_left(sizes, wanted)
    if index == len(sizes):
        raise ValueError(f"{wanted} {name} exceed the largest bucket of {sizes[-1]}")
    return sizes[index]
