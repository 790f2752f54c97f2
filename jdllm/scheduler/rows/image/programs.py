"""Which programs image rows need, and whether they have been compiled.

Programs of sizes that are not compiled at start are compiled when somebody first asks for them. A
request asks for all programs that it needs alone before it is admitted, so that it holds no place
while they are compiled. A program that is not used for long may be forgotten, so rows ask again
before each launch; a row then waits in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from jdllm.options import image_params
from jdllm.scheduler import batch
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows.image import stay
from jdllm.scheduler.rows.image.buckets import (
    BeginBucket,
    DecodeBucket,
    EncodeBucket,
    ImageBuckets,
    StepBucket,
    Windows,
)
from jdllm.scheduler.rows.image.captions import CaptionStore

Bucket = TypeVar("Bucket", bound=batch.Bucket)


class Programs:
    """Asks for programs; `is_ready` says whether that of a bucket is compiled (None: all are)."""

    def __init__(self, buckets: ImageBuckets, captions: CaptionStore):
        self.is_ready: Callable[[batch.Bucket], bool] | None = None
        self.is_missing = False  # one was asked for in this round that is not compiled
        self._buckets = buckets
        self._captions = captions
        self._answers: dict[object, bool] = {}  # of this round, by what requests need

    def end_round(self) -> None:
        """Forgets the answers: until the next round, programs may be compiled or forgotten."""
        self.is_missing = False
        self._answers.clear()

    def has(self, bucket: batch.Bucket) -> bool:
        """Returns whether a program is compiled; if not, it is asked for."""
        is_ready = self.is_ready is None or self.is_ready(bucket)
        self.is_missing |= not is_ready
        return is_ready

    def first(self, buckets: Iterable[Bucket]) -> Bucket:
        """Returns the first bucket with a program; the caller knows that there is one."""
        return next(filter(self.has, buckets))

    def has_all(self, request: Request) -> bool:
        """Returns whether all are compiled that a waiting request needs; asks for all others."""
        if self.is_ready is None:
            return True
        image = stay.image_of(request)
        captions = stay.captions_of(request)
        unknown = [len(ids) for ids in captions if not self._captions.is_known(ids)]
        is_preview_wanted = request.num_frames < len(image.preview_steps)
        needs = (
            stay.group_of(request),
            self._buckets.tokens_of(max(map(len, captions))),
            frozenset(map(self._buckets.tokens_of, unknown)),
            image.latents is None,
            self._buckets.windows,
            frozenset((image.output, *(("image",) if is_preview_wanted else ()))),
        )
        if needs not in self._answers:
            # Of all, at once: they are then compiled one after the other.
            self._answers[needs] = all([self.has(bucket) for bucket in _alone(*needs)])
        self.is_missing |= not self._answers[needs]
        return self._answers[needs]


def _alone(
    group: stay.Group,
    tokens: int,
    unknown: Iterable[int],
    draws_latents: bool,
    windows: Windows | None,
    outputs: Iterable[image_params.Output],
) -> list[batch.Bucket]:
    """Returns the buckets of one row with which a request runs alone, in the order of their use."""
    height, width = group.height, group.width
    buckets: list[batch.Bucket] = [
        EncodeBucket(rows=1, tokens=length) for length in sorted(unknown)
    ]
    if windows is not None:
        buckets.append(windows.bucket(is_guided=group.is_guided))
    if not draws_latents:
        buckets.append(BeginBucket(height=height, width=width))
    buckets.append(StepBucket(rows=1, tokens=tokens, **group._asdict()))
    return buckets + [
        DecodeBucket(rows=1, height=height, width=width, output=output)
        for output in sorted(outputs)
    ]
