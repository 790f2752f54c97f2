"""Rows of image models: each is denoised in a known number of steps, whatever its neighbours do.

A request is encoded (its caption's embedding enters an entry of the device's store), begins (only
if its latents are given), takes its steps and is decoded; previews are decoded in between, and some
models have the modulation of several steps made before them (`image_modulation`). The host knows
all of that beforehand, and launches run in order. So it plans without reading results: a stay
counts what has been planned.

Whose turn it is. Images of one size share steps, at whatever step each is; guided ones and those
with a step cache have steps of their own. The row that was stepped least recently goes next, with
the rows of its group, again the least recently stepped first, but for those with captions of so
different a length that steps of their own save time (`image_sharing`). So a row that is ready waits
for fewer steps than there are running rows. Between two steps there is at most one other launch
while some row is ready for a step. Outputs go before new rows, the oldest first; modulation comes
between the two.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Self

from jdllm import errors
from jdllm.scheduler.batch import Bucket, Pause, RowResult, ScheduleBatch
from jdllm.scheduler.commits import FinishReason, Progress
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows import interface
from jdllm.scheduler.rows.image import batching_log, limits, modulation, programs, row_limits
from jdllm.scheduler.rows.image import sharing as image_sharing
from jdllm.scheduler.rows.image.buckets import (
    BeginBucket,
    CaptionRow,
    DecodeRow,
    EncodeBucket,
    ImageBuckets,
    ImageRow,
    StepBucket,
    StepRow,
    by_room,
)
from jdllm.scheduler.rows.image.captions import CaptionStore
from jdllm.scheduler.rows.image.stay import (
    ImageStay,
    captions_of,
    group_of,
    image_of,
    is_final_due,
    is_output_due,
    output_of,
    stay_of,
)

logger = logging.getLogger(__name__)

# How often to ask whether a program has been compiled, while nothing else can run.
PROGRAM_POLL_S = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageRowConfig(interface.RowConfig):
    """What image rows are built from; they have neither context nor pages.

    `num_entries` captions fit into the device's store. When nothing runs, the first step may wait
    up to `start_delay_s` after an arrival, so that more requests can join. `logs_batching`: the log
    says how images share steps.
    """

    buckets: ImageBuckets
    limits_of_images: limits.ImageLimits
    num_entries: int
    start_delay_s: float = 0.0
    logs_batching: bool = False
    context_length: int = 1
    block_size: int = 1
    page_size: int = 1
    num_pages: int = 0
    prefill_token_budget: int = 1
    max_prefill_tokens: int = 1


class ImageRows:
    """Plans encodings, steps and decodings of all running image requests.

    Requests whose `programs` are not compiled yet wait, hold no place and delay no others.
    """

    defaults: ClassVar[interface.RowDefaults] = interface.RowDefaults(
        cpu_rows=4,
        accelerator_rows=32,
        unused_options=("max_prefill_tokens", "disable_fused_commit"),
        why_unused="which writes no tokens",
    )

    def __init__(self, config: ImageRowConfig, now: Callable[[], float] = time.monotonic):
        self.captions = CaptionStore(config.num_entries)
        self.live = config.live_requests(self.captions)
        self.programs = programs.Programs(config.buckets, self.captions)
        self._config = config
        self._buckets = config.buckets
        self._row_limits = row_limits.RowLimits()
        self._modulation = modulation.Modulation(
            config.buckets.windows, self.captions, self.programs, self._row_limits
        )
        self._batching_log = batching_log.BatchingLog() if config.logs_batching else None
        self._now = now
        self._num_turns = 0
        self._is_steps_turn = False  # the last launch was not a step

    @classmethod
    def build(cls, config: interface.RowConfig) -> Self:
        """Returns rows with the given buckets."""
        if not isinstance(config, ImageRowConfig):
            raise errors.ConfigError("image rows are built from an ImageRowConfig")
        return cls(config)

    @property
    def max_rows(self) -> int:
        """The most rows that may run at once: more than fit into a step take turns."""
        return self._config.max_running_requests

    def buckets(self) -> list[Bucket]:
        """Returns every bucket of the sizes that are compiled at start."""
        return self._buckets.all()

    def buckets_of(self, height: int, width: int) -> list[Bucket]:
        """Returns the buckets that images of one size need, but for the encoding of captions."""
        return self._buckets.of(height, width)

    def default_new_tokens(self, prompt_len: int, block_length: int | None) -> int:
        """Returns 1; images have no tokens."""
        del prompt_len, block_length
        return 1

    def prepare(self, request: Request) -> None:
        """Raises a `RequestError` that names the field for a request that could never run."""
        if request.image is None:
            raise errors.RequestError("this model makes images and no text", param="model")
        self._config.limits_of_images.check(request.image)
        limits.check_captions(
            request,
            request.image,
            guided=self._buckets.guided,
            cached=self._buckets.cached,
            max_tokens=self._buckets.tokens[-1],
            num_entries=self.captions.num_entries,
        )

    def admit(self, request: Request) -> ImageStay | interface.Refusal:
        """Takes entries for the captions, if all programs are there that the request needs."""
        if not self.programs.has_all(request):
            return interface.Refusal.NOT_READY
        image = image_of(request)
        entries = self.captions.take(captions_of(request))
        if entries is None:
            return interface.Refusal.NO_ROOM
        return ImageStay(
            slot=self.live.next_slot,
            entries=entries,
            previews=image.preview_steps[request.num_frames :],
            turn=self._num_turns,
            has_begun=image.latents is None,
        )

    def plan(self) -> ScheduleBatch | Pause | None:
        """Returns the next launch, or a pause if there is nothing to launch for any row."""
        if not self.live.by_id:
            return None
        planned = self._plan()
        self.programs.end_round()
        return planned

    def _plan(self) -> ScheduleBatch | Pause:
        ready = [one for one in self.live.running if self._can_step(one)]
        held_s = self._held_s(ready)
        if held_s:
            ready = []
        batch = None
        if not (ready and self._is_steps_turn):
            batch = (
                self._decode()
                or self._modulation.plan(self.live.running)
                or self._encode_or_begin()
            )
        if batch is not None:
            self._is_steps_turn = True
            return batch
        if ready:
            self._is_steps_turn = False
            return self._step(ready)
        poll_s = PROGRAM_POLL_S if self.programs.is_missing else math.inf
        return Pause(seconds=min(held_s or math.inf, poll_s))

    def apply(self, request: Request, result: RowResult) -> Progress:
        """Counts the row's forwards; returns previews and, at the end, the product."""
        request.nfe += result.nfe
        stay = stay_of(request)
        stay.num_skipped += result.num_skipped
        request.num_skipped = stay.num_skipped
        stay.num_done += result.nfe
        if not stay.num_done:  # its caption or its latents are there only now
            request.began_s = self._now()
        elif result.nfe and stay.num_done == image_of(request).num_inference_steps:
            request.denoised_s = self._now()
        if result.is_invalid:
            return Progress()
        request.num_frames += len(result.frames)
        finish = None
        if result.product is not None:
            finish = FinishReason(kind="stop", finished_len=0)
        return Progress(frames=result.frames, finish=finish, product=result.product)

    def settle(self, request: Request, result: RowResult) -> None:
        """Does nothing: a stay is updated when launches are planned."""

    def steps_left(self, request: Request) -> float:
        """Returns how many steps of the request have not been reported."""
        return image_of(request).num_inference_steps - stay_of(request).num_done

    def halve(self, batch: ScheduleBatch) -> bool:
        """Lowers the rows of launches of this shape; returns False if the batch had one row."""
        is_smaller = self._row_limits.halve(batch.bucket)
        if is_smaller:
            logger.warning("too little memory for %s: smaller launches from now on", batch.bucket)
        return is_smaller

    def note_good(self, batch: ScheduleBatch) -> None:
        """Counts launches that fitted; after many of them, larger ones are tried again."""
        if self._row_limits.note_good(batch.bucket, self._buckets.sizes_like):
            logger.info("memory sufficed for %s: larger launches on trial", batch.bucket)

    def _can_step(self, request: Request) -> bool:
        stay = stay_of(request)
        return (
            stay.num_planned < image_of(request).num_inference_steps
            and stay.has_begun
            and all(map(self.captions.is_written, stay.entries))
            and not stay.is_preview_due
            and self._modulation.is_there(request)
            and self.programs.has(self._step_shape(request))
        )

    def _held_s(self, ready: Sequence[Request]) -> float:
        """Returns how long the first step is to be held, so that more requests can join."""
        delay_s = self._config.start_delay_s
        if not (delay_s and ready) or any(stay_of(one).num_planned for one in self.live.running):
            return 0.0
        for one in ready:
            members = [other for other in ready if group_of(other) == group_of(one)]
            if len(members) >= self._step_sizes(one)[-1]:
                return 0.0
        return max(0.0, min(one.arrival_s for one in ready) + delay_s - self._now())

    def _step(self, ready: Sequence[Request]) -> ScheduleBatch:
        """Returns a step of the group whose turn it is."""
        order = sorted(ready, key=lambda one: stay_of(one).turn)  # stable: ties by rank
        group = [one for one in order if group_of(one) == group_of(order[0])]
        bucket, sharing = self._best_step(group)
        members = sharing[: bucket.rows]
        self._num_turns += 1
        self._log_batching(members, sharing, ready)
        rows = []
        for one in members:
            stay = stay_of(one)
            rows.append(
                StepRow(
                    request=one,
                    stay=stay,
                    step=stay.num_planned,
                    place=self._modulation.place(one),
                    is_fresh=stay.is_fresh,
                )
            )
            if not stay.num_planned:
                one.began_s = self._now()
            stay.num_planned += 1
            stay.turn, stay.is_fresh = self._num_turns, False
        return ScheduleBatch(rows=tuple(rows), bucket=bucket)

    def _best_step(self, group: Sequence[Request]) -> tuple[StepBucket, list[Request]]:
        """Returns the best step for the first of a group, and who could share it, in this order."""
        shapes = [self._step_shape(one) for one in group]
        lengths = [shape.tokens for shape in shapes]
        choices = image_sharing.choices(
            self._buckets, shapes[0], self._step_sizes(group[0]), lengths
        )
        bucket = self.programs.first(choices)
        return bucket, [group[place] for place in choices[bucket]]

    def _log_batching(
        self,
        members: Sequence[Request],
        sharing: Sequence[Request],
        ready: Sequence[Request],
    ) -> None:
        """Notes a step of `members` for the log, if it is wanted; see `BatchingLog.note`."""
        if self._batching_log is None:
            return
        height, width, is_guided, _ = group_of(members[0])
        most = self._step_sizes(members[0])[-1]
        bound = "max_size" if most > 1 else "dynamic_disabled"
        if self._buckets.is_bounded_by_rules(height, width, is_guided):
            bound = f"config_cap:{most}"
        now = self._now()
        waits_s = [now - one.arrival_s for one in members if not stay_of(one).num_planned]
        self._batching_log.note(members, sharing, ready, most=most, bound=bound, waits_s=waits_s)

    def _decode(self) -> ScheduleBatch | None:
        """Returns a launch for the oldest output that is due, and others of its shape."""
        due = [one for one in self.live.running if is_output_due(one)]
        # Of equally old ones, first the previews: their rows wait for them.
        due.sort(key=lambda one: (stay_of(one).turn, is_final_due(one)))
        shape = next(filter(self.programs.has, dict.fromkeys(map(output_of, due))), None)
        if shape is None:
            return None
        members = [one for one in due if output_of(one) == shape]
        ladder = self._buckets.decode_sizes(shape.height, shape.width)
        sizes = by_room(self._row_limits.allowed(shape, ladder), len(members))
        bucket = self.programs.first(dataclasses.replace(shape, rows=size) for size in sizes)
        rows = []
        for one in members[: bucket.rows]:
            stay = stay_of(one)
            is_final = is_final_due(one)
            rows.append(DecodeRow(request=one, stay=stay, step=stay.num_planned, is_final=is_final))
            stay.is_decoded, stay.previews = is_final, stay.previews[1:]
        return ScheduleBatch(rows=tuple(rows), bucket=bucket)

    def _encode_or_begin(self) -> ScheduleBatch | None:
        """Returns what the first row by rank needs that lacks its caption or given latents."""
        captions = list(self._missing_captions())
        for one in self.live.running:
            stay, image = stay_of(one), image_of(one)
            if captions and captions[0].request is one and (batch := self._encode(captions)):
                return batch
            begin = BeginBucket(height=image.height, width=image.width)
            if not stay.has_begun and self.programs.has(begin):
                row = ImageRow(request=one, stay=stay, is_fresh=stay.is_fresh)
                stay.has_begun, stay.is_fresh = True, False
                return ScheduleBatch(rows=(row,), bucket=begin)
        return None

    def _missing_captions(self) -> Iterator[CaptionRow]:
        """Yields each caption to be encoded once, with the first request by rank that holds it."""
        seen = set()
        for one in self.live.running:
            for entry in stay_of(one).entries:
                if not self.captions.is_written(entry) and entry not in seen:
                    seen.add(entry)
                    ids = self.captions.caption(entry)
                    yield CaptionRow(
                        request=one, stay=one.held, num_tokens=len(ids), ids=ids, entry=entry
                    )

    def _encode(self, captions: Sequence[CaptionRow]) -> ScheduleBatch | None:
        """Returns a launch of the first captions, as many as one may have; None if not compiled."""
        for count in range(len(captions), 0, -1):
            rows = tuple(captions[:count])
            tokens = max(self._buckets.tokens_of(row.num_tokens) for row in rows)
            shape = EncodeBucket(rows=1, tokens=tokens)
            sizes = self._row_limits.allowed(shape, self._buckets.encode_sizes(tokens))
            bucket = dataclasses.replace(shape, rows=by_room(sizes, count)[0])
            if bucket.rows >= count and self.programs.has(bucket):
                for row in rows:
                    self.captions.note_written(row.entry)
                return ScheduleBatch(rows=rows, bucket=bucket)
        return None

    def _step_sizes(self, request: Request) -> tuple[int, ...]:
        """Returns how many requests of this group a step may have."""
        height, width, is_guided, _ = group_of(request)
        ladder = self._buckets.step_sizes(height, width, is_guided)
        return self._row_limits.allowed(self._step_shape(request), ladder)

    def _step_shape(self, request: Request) -> StepBucket:
        """Returns the bucket of a step of the request alone."""
        longest = max(len(self.captions.caption(entry)) for entry in stay_of(request).entries)
        tokens = self._buckets.tokens_of(longest)
        return StepBucket(rows=1, tokens=tokens, **group_of(request)._asdict())
