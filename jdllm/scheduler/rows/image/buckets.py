"""Launches of image rows: their buckets, their rows, and which compiled sizes there are.

Every launch does one thing. It encodes captions, writes given latents, runs one denoising step, or
decodes. Launches of one pipeline run in order on the device, so what a launch needs is there as
soon as the launch that makes it has been planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from jdllm import errors
from jdllm.options import image_params
from jdllm.scheduler.batch import Bucket, ScheduledRow
from jdllm.scheduler.sizes import check_ascending, smallest

# In pixels: rows of a launch times the size of an image. Compute bounds a step of 12 images of
# 512 x 512 (H200, Z-Image: 21.2 ms a row at 4 rows, 21.4 at 12), so more rows gain nothing.
MOST_STEP_PIXELS = 16 * 512 * 512
MOST_DECODE_PIXELS = 8 * 512 * 512


def rows_by_pixels(pixels: int) -> Callable[[int, int], int]:
    """Returns how many images (height, width) together have at most so many pixels; at least 1."""
    return lambda height, width: max(1, pixels // (height * width))


def one_token_for_16x16(height: int, width: int) -> int:
    """Returns the tokens of an image (height, width) in pixels, as of the published models."""
    return height * width // 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBucket(Bucket):
    """Up to `rows` captions of at most `tokens` tokens each, written into entries of the store."""

    name: ClassVar[str] = "encode"
    denoises: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeginBucket(Bucket):
    """Writes given latents into the slot of one row."""

    name: ClassVar[str] = "begin"
    denoises: ClassVar[bool] = False

    rows: int = 1
    tokens: int = 0
    height: int
    width: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModulateBucket(Bucket):
    """Makes what modulates a window of steps of up to `rows` requests, `num_passes` for each."""

    name: ClassVar[str] = "modulate"
    denoises: ClassVar[bool] = False

    tokens: int = 0
    num_passes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBucket(Bucket):
    """One denoising step of up to `rows` requests with captions of at most `tokens` tokens.

    Guided requests take 2 * `rows` rows of the transformer. `is_cached`: rows may leave out blocks
    of the transformer.
    """

    name: ClassVar[str] = "step"

    height: int
    width: int
    is_guided: bool
    is_cached: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBucket(Bucket):
    """Gives images (of 8 bits, or floats) or latents of up to `rows` rows: the clean prediction.

    After the last step of all, the clean prediction is the final latents. So previews and final
    images share launches.
    """

    name: ClassVar[str] = "decode"
    denoises: ClassVar[bool] = False

    tokens: int = 0
    height: int
    width: int
    output: image_params.Output


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow(ScheduledRow):
    """A row of a launch of images; in the launch that begins it, its latents are given."""

    start: int = 0
    num_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaptionRow(ImageRow):
    """A caption to encode into an entry of the store; a request may have two in a launch."""

    ids: tuple[int, ...]
    entry: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRow(ImageRow):
    """The row's denoising step number `step`, counted from 0.

    If it `is_fresh`, its latents are drawn from the seed first. Where modulation is made before
    steps, that of this one stands at `place` in the window of its slot.
    """

    step: int
    place: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModulateRow(ImageRow):
    """A row whose window begins with step number `step`."""

    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow(ImageRow):
    """A row after `step` steps. Its output is a `Frame` of this step, or the product if final."""

    step: int
    is_final: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Modulation is made before the steps: for each running image that of `steps` of them.

    `by_caption`: it depends on the caption, and a guided image has that of two. `rows` are the
    requests that a launch may have, ascending from 1.
    """

    steps: int
    by_caption: bool
    rows: tuple[int, ...] = (1, 2, 4, 8)

    def bucket(self, *, is_guided: bool, rows: int = 1) -> ModulateBucket:
        """Returns the launch for requests with or without guidance."""
        return ModulateBucket(rows=rows, num_passes=2 if is_guided and self.by_caption else 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageBuckets:
    """Ascending compiled sizes; those of rows begin with 1.

    `rows` are requests of a step, `tokens` lengths of captions, and `sizes` the (height, width)
    that are compiled at start. `guided` and `cached` say which kinds of steps are served. A forward
    of an image (height, width) has at most `most_rows` rows, two for a guided request, and a decode
    launch `most_decode_rows`; both have at most `most_requests` (None: no such bound). An encode
    launch has at most `encode_tokens` tokens, padding included, because running rows wait for it.
    `windows` are those of modulation, None if steps make all of it.

    `launch_cost` is what a step costs beside its rows, in rows with the shortest captions. A large
    model's step takes time in proportion to its tokens, padding included; an image (height, width)
    has `image_tokens`. Then a full launch is better than a larger one with padding, and so is one
    without a much longer caption: the rows that are left go first in the next one. A high cost
    (small models) makes steps take padding.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 12)
    encode_rows: tuple[int, ...] = (1, 2, 4, 8)
    decode_rows: tuple[int, ...] = (1, 2, 4)
    tokens: tuple[int, ...] = (32, 64, 128, 256, 512)
    encode_tokens: int = 2048
    sizes: tuple[tuple[int, int], ...] = ((1024, 1024),)
    guided: tuple[bool, ...] = (False, True)
    cached: tuple[bool, ...] = (False,)
    windows: Windows | None = None
    most_rows: Callable[[int, int], int] = rows_by_pixels(MOST_STEP_PIXELS)
    most_decode_rows: Callable[[int, int], int] = rows_by_pixels(MOST_DECODE_PIXELS)
    most_requests: Callable[[int, int], int | None] | None = None
    image_tokens: Callable[[int, int], int] = one_token_for_16x16
    launch_cost: float = 0.1

    def __post_init__(self) -> None:
        for name in ("rows", "encode_rows", "decode_rows"):
            ladder: tuple[int, ...] = getattr(self, name)
            check_ascending(name, ladder)
            if ladder[0] != 1:
                raise errors.ConfigError(f"{name}={ladder} must begin with 1")
        check_ascending("tokens", self.tokens)
        if self.encode_tokens < self.tokens[-1]:
            raise errors.ConfigError(
                f"{self.encode_tokens=} of a launch must hold the longest caption of "
                f"{self.tokens[-1]} tokens"
            )
        if not self.guided:
            raise errors.ConfigError("guided is empty: no kind of step is served")

    def all(self) -> list[Bucket]:
        """Returns every bucket of the sizes that are compiled at start."""
        encode = [
            EncodeBucket(rows=rows, tokens=tokens)
            for tokens in self.tokens
            for rows in self.encode_sizes(tokens)
        ]
        sized = [bucket for size in self.sizes for bucket in self.of(*size)]
        return [*encode, *self._modulate(), *sized]

    def _modulate(self) -> list[Bucket]:
        if (windows := self.windows) is None:
            return []
        buckets = (
            windows.bucket(is_guided=is_guided, rows=rows)
            for is_guided in self.guided
            for rows in windows.rows
        )
        return list(dict.fromkeys(buckets))

    def of(self, height: int, width: int) -> list[Bucket]:
        """Returns the buckets that images of one size need, but for the encoding of captions."""
        begin: Bucket = BeginBucket(height=height, width=width)
        steps = [
            StepBucket(
                rows=rows, tokens=tokens, height=height, width=width,
                is_guided=is_guided, is_cached=is_cached,
            )
            for is_cached in self.cached
            for is_guided in self.guided
            for rows in self.step_sizes(height, width, is_guided)
            for tokens in self.tokens
        ]  # fmt: skip
        outputs: tuple[image_params.Output, ...] = ("image", "latent")
        decodes = [
            DecodeBucket(rows=rows, height=height, width=width, output=output)
            for output in outputs
            for rows in self.decode_sizes(height, width)
        ]
        return [begin, *steps, *decodes]

    def step_sizes(self, height: int, width: int, is_guided: bool) -> tuple[int, ...]:
        """Returns the requests that a step of such images may have."""
        most = self.most_rows(height, width) // (1 + is_guided)
        return up_to(self.rows, self._bounded(most, height, width))

    def decode_sizes(self, height: int, width: int) -> tuple[int, ...]:
        """Returns the rows that a decode launch of such images may have."""
        most = self.most_decode_rows(height, width)
        return up_to(self.decode_rows, self._bounded(most, height, width))

    def sizes_like(self, bucket: Bucket) -> tuple[int, ...]:
        """Returns the rows that launches of a bucket's shape may have."""
        match bucket:
            case EncodeBucket(tokens=tokens):
                return self.encode_sizes(tokens)
            case ModulateBucket() if self.windows is not None:
                return self.windows.rows
            case StepBucket(height=height, width=width, is_guided=is_guided):
                return self.step_sizes(height, width, is_guided)
            case DecodeBucket(height=height, width=width):
                return self.decode_sizes(height, width)
        return (bucket.rows,)

    def is_bounded_by_rules(self, height: int, width: int, is_guided: bool) -> bool:
        """Returns whether steps of such images would have more requests without `most_requests`."""
        free = dataclasses.replace(self, most_requests=None).step_sizes(height, width, is_guided)
        return self.step_sizes(height, width, is_guided) != free

    def _bounded(self, most: int, height: int, width: int) -> int:
        bound = None if self.most_requests is None else self.most_requests(height, width)
        return most if bound is None else min(most, bound)

    def encode_sizes(self, tokens: int) -> tuple[int, ...]:
        """Returns how many captions of `tokens` tokens an encode launch may have."""
        return up_to(self.encode_rows, self.encode_tokens // tokens)

    def tokens_of(self, length: int) -> int:
        """Returns the smallest compiled length of a caption that holds `length` tokens."""
        return smallest(self.tokens, length, "tokens")


def up_to(ladder: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the sizes that are at most `most`, and the first size in any case."""
    return (ladder[0], *(size for size in ladder[1:] if size <= most))


def by_room(sizes: Sequence[int], count: int) -> list[int]:
    """Returns the smallest size that holds `count` rows, then smaller ones; else all, downwards."""
    enough = next((size for size in sizes if size >= count), sizes[-1])
    return [size for size in reversed(sizes) if size <= enough]
