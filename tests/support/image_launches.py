"""A golden pipeline on a real runner, with batches made by hand: no scheduler.

`Golden` is what a test knows of one pipeline. `Device` gives slots and entries, and makes launches
of exactly the rows that a test names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.device import devices
from jdllm.options import image_params, sampling_params
from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines import loaded
from jdllm.pipelines.folder import PipelineFolder
from jdllm.runner import model_runner
from jdllm.runner.image import kind
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows.image import buckets as image_buckets
from jdllm.scheduler.rows.image import stay

ROWS = 4
PROMPTS = (
    "",
    "A red bicycle.",
    "A wide watercolor painting of an old lighthouse on a cliff at night, with neon signs along "
    "the street below, two cats on a blue sofa near the window, seven paper boats in a shallow "
    "pool, each boat with a number painted on it, and snowy mountains in the background under "
    "soft morning light.",
)
NEGATIVE = "Blurry, low quality."


def step_bucket(size, rows=ROWS, *, is_guided=False, is_cached=False, tokens):
    height, width = size
    return image_buckets.StepBucket(
        rows=rows,
        tokens=tokens,
        height=height,
        width=width,
        is_guided=is_guided,
        is_cached=is_cached,
    )


def decode_bucket(size, output="image", rows=ROWS):
    height, width = size
    return image_buckets.DecodeBucket(rows=rows, height=height, width=width, output=output)


def encode_bucket(rows, tokens):
    return image_buckets.EncodeBucket(rows=rows, tokens=tokens)


def modulate_bucket(rows=ROWS, *, num_passes=1):
    return image_buckets.ModulateBucket(rows=rows, num_passes=num_passes)


def begin_bucket(size):
    return image_buckets.BeginBucket(height=size[0], width=size[1])


def statically_shifted_levels(shift, steps):
    """Returns the noise levels of a schedule whose shift depends on nothing, by the formula."""
    levels = np.linspace(1, 1 / steps, steps)
    return [*(shift * levels / (1 + (shift - 1) * levels)), 0.0]


def shifted_levels(schedule, steps, tokens):
    """Returns the noise levels of a dynamic schedule (a parsed config) by the published formula.

    The shift grows with the tokens along the line through both bounds. With a terminal level all
    are stretched so that the last before 0 is that one.
    """
    assert schedule["use_dynamic_shifting"] and schedule["time_shift_type"] == "exponential"
    bounds = [schedule[f"{name}_image_seq_len"] for name in ("base", "max")]
    shifts = [schedule[f"{name}_shift"] for name in ("base", "max")]
    slope = (shifts[1] - shifts[0]) / (bounds[1] - bounds[0])
    strength = np.exp(shifts[0] + slope * (tokens - bounds[0]))
    plain = np.linspace(1, 1 / steps, steps)
    shifted = strength / (strength + 1 / plain - 1)
    if schedule["shift_terminal"] and steps > 1:
        shifted = 1 - (1 - shifted) * (1 - schedule["shift_terminal"]) / (1 - shifted[-1])
    return [*shifted, 0.0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """One pipeline with whole runs of diffusers; lengths of captions count the prefix.

    `runs` has options of `ask` by the names of the runs in the arrays, `{H}x{W}/{run}/{prompt}/`;
    the first run has no negative prompt. Captions have `tokens` in launches, more than any needs.
    The first two prompts fit `short_tokens`, too; runs of the first size that are too long for
    `tokens` fit `long_tokens`. `plain` and `guided` are options of requests without and with a
    negative prompt; `draw` draws more, its second argument says whether there is one. `levels`
    gives the noise levels of steps by the published formula.
    """

    name: str
    folder_path: Callable[[], pathlib.Path]
    read_arrays: Callable[[], Mapping[str, np.ndarray]]
    sizes: tuple[tuple[int, int], tuple[int, int]]
    runs: Mapping[str, Mapping[str, Any]]
    config: kind.ImageKindConfig
    tokens: int
    short_tokens: int
    levels: Callable[[int, tuple[int, int]], Sequence[float]]
    plain: Mapping[str, Any]
    guided: Mapping[str, Any]
    draw: Callable[[random.Random, bool], Mapping[str, Any]]
    max_sequence_length: int
    long_tokens: int | None = None

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self is other

    @functools.cache  # noqa: B019, which live as long as the process
    def folder(self) -> PipelineFolder:
        return pipeline_folder.read(self.folder_path())

    @functools.cache  # noqa: B019
    def pipeline(self) -> loaded.LoadedPipeline:
        return loaded.load(self.folder(), "auto", devices.facts(), show_progress=False)

    @functools.cache  # noqa: B019
    def arrays(self) -> Mapping[str, np.ndarray]:
        return self.read_arrays()

    @functools.cache  # noqa: B019
    def ids_of(self, prompt: str, length: int | None = None) -> tuple[int, ...]:
        tokenizer = self.pipeline().pipeline.prompt_tokenizer(self.folder().tokenizers)
        length = length or self.max_sequence_length
        return tokenizer.encode(prompt, max_sequence_length=length).ids

    def initial(self, size, j):
        """Returns the initial latents of a golden run."""
        return self.arrays()[f"{size[0]}x{size[1]}/latents"][j]

    def steps_of(self, size, run, who):
        """Returns the latents after each step, [N, B, ...]."""
        steps = self.arrays()[f"{size[0]}x{size[1]}/{run}/{who}/latents_steps"]
        has_rows = steps.ndim == self.initial(size, 0).ndim + 2
        return steps if has_rows else steps[:, None]

    def pixels_of(self, size, run, who):
        """Returns images [B, H, W, 3], or None if they are not stored."""
        pixels = self.arrays().get(f"{size[0]}x{size[1]}/{run}/{who}/uint8")
        return pixels if pixels is None or pixels.ndim == 4 else pixels[None]

    @property
    def plain_run(self) -> str:
        return next(iter(self.runs))

    def ask(
        self, prompt=PROMPTS[1], *, size=None, steps=4, negative=None, seed=0, latents=None,
        output="image", partial=0, length=None, name="", **options,
    ):  # fmt: skip
        """Returns a request, guided if it has a negative prompt; options are of `ImageParams`."""
        height, width = size or self.sizes[0]
        is_guided = negative is not None
        return Request(
            request_id=name,
            prompt_ids=list(self.ids_of(prompt, length)),
            sampling=sampling_params.SamplingParams(),
            max_new_tokens=1,
            seed=seed,
            image=image_params.ImageParams(
                height=height,
                width=width,
                num_inference_steps=steps,
                is_guided=is_guided,
                negative_ids=self.ids_of(negative, length) if is_guided else None,
                partial_images=partial,
                latents=latents,
                output=output,
                **{**(self.guided if is_guided else self.plain), **options},
            ),
        )

    @property
    def buckets(self):
        """Returns all programs of the tests here."""
        sizes, tokens, short = self.sizes, self.tokens, self.short_tokens
        found = [
            encode_bucket(ROWS, tokens),
            encode_bucket(1, short),
            *(begin_bucket(size) for size in sizes),
            *(
                step_bucket(size, is_guided=guided, tokens=tokens)
                for size in sizes
                for guided in (False, True)
            ),
            step_bucket(sizes[0], rows=1, tokens=tokens),
            step_bucket(sizes[0], rows=1, tokens=short),
            *self.modulate_buckets,
            *(decode_bucket(size) for size in sizes),
            *(decode_bucket(size, "latent") for size in sizes),
        ]
        if self.long_tokens is not None:
            found += [encode_bucket(ROWS, self.long_tokens)]
            found += [step_bucket(sizes[0], tokens=self.long_tokens)]
        return tuple(found)

    @property
    def modulate_buckets(self):
        """Returns launches for modulation, which some pipelines have made before steps."""
        ahead = self.pipeline().pipeline.modulation
        passes = () if ahead is None else (1, 2) if ahead.by_caption else (1,)
        return [modulate_bucket(num_passes=one) for one in passes]

    @functools.cache  # noqa: B019
    def compiled(self) -> model_runner.ModelRunner:
        """Returns a runner that all tests share; what they leave in its memory must not matter."""
        model = self.pipeline()
        runner = model_runner.ModelRunner(
            model.params, kind.ImageKind(model.pipeline, self.config), device=devices.facts()
        )
        runner.compile(self.buckets)
        return runner

    def device(self, rng=None, runner=None):
        return Device(self, rng, runner)

    def tokens_of(self, *requests):
        """Returns the compiled length of the captions of requests."""
        longest = max(len(ids) for one in requests for ids in captions(one))
        if longest <= self.tokens:
            return self.tokens
        assert self.long_tokens is not None and longest <= self.long_tokens
        return self.long_tokens


def ask_again(request):
    """Returns a new request for the same image, without previews."""
    image = dataclasses.replace(request.image, partial_images=0)
    return Request(
        request_id=f"{request.request_id} again",
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        max_new_tokens=1,
        seed=request.seed,
        image=image,
    )


class Row:
    """One image on the device: its slot, its entries, and how many steps it has taken."""

    def __init__(self, request, slot, entries):
        self.request, self.step = request, 0
        self.is_fresh = request.image.latents is None
        self.stay = stay.ImageStay(
            slot=slot, entries=entries, previews=(), turn=0, has_begun=self.is_fresh
        )

    @property
    def size(self):
        return self.request.image.height, self.request.image.width

    @property
    def is_done(self):
        return self.step == self.request.image.num_inference_steps

    @property
    def group(self):
        image = self.request.image
        return self.size, image.is_guided, image.residual_diff_threshold > 0


class Device:
    """Makes launches by hand; all devices of a pipeline have one memory, so rows of two must not
    run at once.
    """

    def __init__(self, golden, rng=None, runner=None):
        self.golden, self.runner = golden, runner or golden.compiled()
        self._slots = list(range(golden.config.num_slots))
        self._entries = list(range(golden.config.num_entries))
        if rng is not None:
            rng.shuffle(self._slots)
            rng.shuffle(self._entries)

    def enter(self, *requests, rows=ROWS, tokens=None):
        """Encodes the captions of requests, writes given latents, and returns the rows."""
        made = [
            Row(one, self._slots.pop(), tuple(self._entries.pop() for _ in captions(one)))
            for one in requests
        ]
        wanted = [
            image_buckets.CaptionRow(
                request=row.request, stay=row.stay, num_tokens=len(ids), ids=ids, entry=entry
            )
            for row in made
            for ids, entry in zip(captions(row.request), row.stay.entries)
        ]
        bucket = encode_bucket(rows, tokens or self.golden.tokens_of(*requests))
        for i in range(0, len(wanted), rows):
            self.launch(bucket, wanted[i : i + rows])
        for row in made:
            if row.request.image.latents is not None:
                scheduled = image_buckets.ImageRow(
                    request=row.request, stay=row.stay, is_fresh=True
                )
                self.launch(begin_bucket(row.size), [scheduled])
        return made

    def modulate(self, *rows):
        """Makes the modulation of the rows' next steps."""
        is_guided = rows[0].request.image.is_guided
        ahead = self.golden.pipeline().pipeline.modulation
        for row in rows:
            row.stay.window = row.step
        self.launch(
            modulate_bucket(num_passes=2 if is_guided and ahead.by_caption else 1),
            [
                image_buckets.ModulateRow(request=row.request, stay=row.stay, step=row.step)
                for row in rows
            ],
        )

    def step(self, *rows, bucket_rows=ROWS, tokens=None):
        """Takes one step of rows of a group; returns the rows' results.

        Where modulation is made before steps, that of rows whose window has ended comes first.
        """
        ((size, is_guided, is_cached),) = {row.group for row in rows}
        if self.golden.pipeline().pipeline.modulation is not None:
            steps = self.golden.config.window_steps
            due = [row for row in rows if row.stay.window in (None, row.step - steps)]
            if due:
                self.modulate(*due)
        scheduled = [
            image_buckets.StepRow(
                request=row.request,
                stay=row.stay,
                step=row.step,
                place=row.step - (row.stay.window or 0),
                is_fresh=row.is_fresh,
            )
            for row in rows
        ]
        for row in rows:
            row.step, row.is_fresh = row.step + 1, False
        tokens = tokens or self.golden.tokens_of(*(row.request for row in rows))
        bucket = step_bucket(
            size, bucket_rows, is_guided=is_guided, is_cached=is_cached, tokens=tokens
        )
        result = self.launch(bucket, scheduled)
        assert [one.nfe for one in result.rows] == [1] * len(rows)
        return result.rows

    def finish(self, *rows, output="image"):
        """Takes all steps of rows that began together; returns what `decode` returns."""
        for _ in range(rows[0].request.image.num_inference_steps):
            self.step(*rows)
        return self.decode(*rows, output=output)

    def decode(self, *rows, output="image"):
        """Returns the products of rows."""
        return [one.product for one in self.decoded(*rows, output=output)]

    def decoded(self, *rows, output="image"):
        scheduled = [
            image_buckets.DecodeRow(
                request=row.request, stay=row.stay, step=row.step, is_final=row.is_done
            )
            for row in rows
        ]
        return self.launch(decode_bucket(rows[0].size, output), scheduled).rows

    def latents(self, row):
        """Returns the latents of a row now, which no program gives out."""
        shape = self.golden.initial(row.size, 0).shape
        held = np.asarray(self.runner._memory["slots"].latents[row.stay.slot])
        return held[: math.prod(shape)].reshape(shape)

    def launch(self, bucket, rows):
        batch = ScheduleBatch(rows=tuple(rows), bucket=bucket)
        result = self.runner.launch(batch).result()
        assert len(result.rows) == len(rows)
        return result


def captions(request):
    """Returns the ids of a request's captions."""
    negative = request.image.negative_ids
    return [tuple(request.prompt_ids), *([] if negative is None else [negative])]
