"""The golden Z-Image pipeline on a real runner, with batches made by hand: no scheduler.

`Device` gives slots and entries, and makes launches of exactly the rows that a test names.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import numpy as np

from jdllm import device as device_lib
from jdllm import image_params, sampling_params
from jdllm.imagegen import kind, loaded, pipeline_folder
from jdllm.runner import model_runner
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import request as request_lib
from jdllm.scheduler.rows import image_buckets, image_stay

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "images" / "z_image"
PIPELINE = GOLDENS / "pipeline"
SQUARE, TALL = (96, 96), (128, 64)
SCALE = 8  # pixels per position of a latent
PROMPTS = (
    "",
    "A red bicycle.",
    "A wide watercolor painting of an old lighthouse on a cliff at night, with neon signs along "
    "the street below, two cats on a blue sofa near the window, seven paper boats in a shallow "
    "pool, each boat with a number painted on it, and snowy mountains in the background under "
    "soft morning light.",
)
NEGATIVE = "Blurry, low quality."
TOKENS = 96  # the compiled length of captions; the longest prompt has 84
ROWS = 4
# Far more memory than a program needs for itself, so that a copy of it shows.
CONFIG = kind.ImageKindConfig(
    num_slots=512, num_entries=256, max_pixels=256 * 256, max_tokens=4 * TOKENS
)


@functools.cache
def folder() -> pipeline_folder.PipelineFolder:
    return pipeline_folder.read(PIPELINE)


@functools.cache
def pipeline() -> loaded.LoadedPipeline:
    return loaded.load(folder(), "auto", device_lib.facts(), show_progress=False)


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "runs.npz") as file:
        return dict(file)


@functools.cache
def ids_of(prompt: str) -> tuple[int, ...]:
    return folder().tokenizers["tokenizer"].encode(prompt, max_sequence_length=512).ids


def step_bucket(size, rows=ROWS, *, is_guided=False, tokens=TOKENS):
    height, width = size
    return image_buckets.StepBucket(
        rows=rows, tokens=tokens, height=height, width=width, is_guided=is_guided
    )


def decode_bucket(size, output="image", rows=ROWS):
    height, width = size
    return image_buckets.DecodeBucket(rows=rows, height=height, width=width, output=output)


def encode_bucket(rows=ROWS, tokens=TOKENS):
    return image_buckets.EncodeBucket(rows=rows, tokens=tokens)


def begin_bucket(size):
    return image_buckets.BeginBucket(height=size[0], width=size[1])


BUCKETS = (
    encode_bucket(),
    encode_bucket(1, 32),
    *(begin_bucket(size) for size in (SQUARE, TALL)),
    *(step_bucket(size, is_guided=guided) for size in (SQUARE, TALL) for guided in (False, True)),
    step_bucket(SQUARE, rows=1),
    step_bucket(SQUARE, rows=1, tokens=32),
    *(decode_bucket(size) for size in (SQUARE, TALL)),
    *(decode_bucket(size, "latent") for size in (SQUARE, TALL)),
)


@functools.cache
def compiled() -> model_runner.ModelRunner:
    """Returns a runner that all tests share; what they leave in its memory must not matter."""
    model = pipeline()
    runner = model_runner.ModelRunner(
        model.params, kind.ImageKind(model.pipeline, CONFIG), device=device_lib.facts()
    )
    runner.compile(BUCKETS)
    return runner


def ask(
    prompt=PROMPTS[1], *, size=SQUARE, steps=4, scale=0.0, negative=NEGATIVE, seed=0, latents=None,
    output="image", partial=0, truncation=1.0, normalization=0.0, name="",
):  # fmt: skip
    """Returns a request, guided if it has a scale."""
    return request_lib.Request(
        request_id=name,
        prompt_ids=list(ids_of(prompt)),
        sampling=sampling_params.SamplingParams(),
        max_new_tokens=1,
        seed=seed,
        image=image_params.ImageParams(
            height=size[0],
            width=size[1],
            num_inference_steps=steps,
            guidance_scale=scale,
            is_guided=scale > 0,
            negative_ids=ids_of(negative) if scale > 0 else None,
            cfg_truncation=truncation,
            cfg_normalization=normalization,
            partial_images=partial,
            latents=latents,
            output=output,
        ),
    )


def ask_again(request):
    """Returns a new request for the same image, without previews."""
    image = dataclasses.replace(request.image, partial_images=0)
    return request_lib.Request(
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
        self.stay = image_stay.ImageStay(
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
        return self.size, self.request.image.is_guided


class Device:
    """Makes launches by hand; all devices have one memory, so rows of two must not run at once."""

    def __init__(self, rng=None, runner=None):
        self.runner = runner or compiled()
        self._slots, self._entries = list(range(CONFIG.num_slots)), list(range(CONFIG.num_entries))
        if rng is not None:
            rng.shuffle(self._slots)
            rng.shuffle(self._entries)

    def enter(self, *requests, rows=ROWS, tokens=TOKENS):
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
        for i in range(0, len(wanted), rows):
            self.launch(encode_bucket(rows, tokens), wanted[i : i + rows])
        for row in made:
            if row.request.image.latents is not None:
                scheduled = image_buckets.ImageRow(
                    request=row.request, stay=row.stay, is_fresh=True
                )
                self.launch(begin_bucket(row.size), [scheduled])
        return made

    def step(self, *rows, bucket_rows=ROWS, tokens=TOKENS):
        """Takes one step of rows of a group; returns the rows' results."""
        ((size, is_guided),) = {row.group for row in rows}
        scheduled = [
            image_buckets.StepRow(
                request=row.request, stay=row.stay, step=row.step, is_fresh=row.is_fresh
            )
            for row in rows
        ]
        for row in rows:
            row.step, row.is_fresh = row.step + 1, False
        bucket = step_bucket(size, bucket_rows, is_guided=is_guided, tokens=tokens)
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
        height, width = (side // SCALE for side in row.size)
        held = np.asarray(self.runner._memory["slots"].latents[row.stay.slot])
        return held[: 16 * height * width].reshape(16, height, width)

    def launch(self, bucket, rows):
        batch = batch_lib.ScheduleBatch(rows=tuple(rows), bucket=bucket)
        result = self.runner.launch(batch).result()
        assert len(result.rows) == len(rows)
        return result


def captions(request):
    """Returns the ids of a request's captions."""
    negative = request.image.negative_ids
    return [tuple(request.prompt_ids), *([] if negative is None else [negative])]


def initial(size, j):
    """Returns the initial latents of a golden run."""
    return arrays()[f"{size[0]}x{size[1]}/latents"][j]


def schedule_of_goldens(steps):
    """Returns the noise levels of the golden schedule by the formula: static shift 3."""
    config = json.loads((PIPELINE / "scheduler" / "scheduler_config.json").read_text())
    assert config["shift"] == 3.0 and not config["use_dynamic_shifting"]
    levels = np.linspace(1, 1 / steps, steps)
    return [*(3 * levels / (1 + 2 * levels)), 0.0]
