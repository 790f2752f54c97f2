"""A device for image rows whose every output can be computed by hand.

An image is one integer. Memory that nobody holds is overwritten with noise before each launch, so
a caption that was lost, a slot used twice or a step out of order changes some product.
"""

import itertools

import numpy as np
from support import hash_model

from jdllm.engine.core import EngineCore
from jdllm.options import image_params, sampling_params
from jdllm.scheduler.batch import Frame, LaunchResult, RowResult
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows.image import buckets as image_buckets
from jdllm.scheduler.rows.image import limits
from jdllm.scheduler.rows.image.buckets import (
    BeginBucket,
    DecodeBucket,
    EncodeBucket,
    ImageBuckets,
    ModulateBucket,
    StepBucket,
)
from jdllm.scheduler.rows.image.rows import ImageRowConfig, ImageRows
from jdllm.scheduler.scheduler import Scheduler

SMALL, WIDE, LARGE = (64, 64), (64, 128), (128, 128)
INVALID_SEED = 13  # step 2 of such a request gives NaN
INVALID_OUTPUT_SEED = 14  # whatever is decoded for such a request is NaN
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 4398046511104 bytes."


def mix(*values):
    """Returns an integer of 64 bits that depends on every value and on their order."""
    total = 0
    for value in values:
        total = (total * 6364136223846793005 + int(value) + 1442695040888963407) % 2**64
        total ^= total >> 29
    return total


def begun(one):
    """Returns the latents before the first step."""
    if one.image.latents is None:
        return mix(1, one.seed, one.image.height, one.image.width)
    return mix(2, *(one.image.latents.reshape(-1) * 8))


def advanced(latents, step, one, captions):
    """Returns latents after the step number `step`, from 0, with these captions."""
    scale = one.image.guidance_scale * 8
    return mix(3, latents, step, one.image.num_inference_steps, scale, *captions)


def embedded(ids):
    return mix(4, *ids)


def clean(latents):
    return mix(5, latents)


def picture(prediction):
    return mix(6, prediction)


def alone(one):
    """Returns (previews by step, product) of a request that runs alone."""
    captions = [embedded(one.prompt_ids)]
    if one.image.is_guided:
        captions.append(embedded(one.image.negative_ids))
    latents, frames = begun(one), {}
    wanted = one.image.preview_steps
    for step in range(one.image.num_inference_steps):
        latents = advanced(latents, step, one, captions)
        if step + 1 in wanted:
            frames[step + 1] = picture(clean(latents))
    last = clean(latents)
    return frames, last if one.image.output == "latent" else picture(last)


def modulated(one, step, captions, by_caption):
    """Returns the modulation of a step; `captions` are as many as it depends on, or more."""
    scale = one.image.guidance_scale * 8
    return mix(7, step, one.image.num_inference_steps, *([scale, *captions] if by_caption else []))


class Device:
    """Runs launches at once. `trace` holds their batches; `fault` gives a launch's error or None.

    `most(bucket)` rows fit into memory. A fault loses the memory; half of the faults appear when
    the result is read, and launches in between fail, too.
    """

    def __init__(self, rows, rng, fault=lambda batch: None, most=lambda bucket: 99):
        self.rows, self.rng, self.fault, self.most = rows, rng, fault, most
        self.trace, self.captions, self.latents, self.clean = [], {}, {}, {}
        self.windows = rows._buckets.windows
        self.modulations = {}  # of each slot: that of the steps of its window
        self.programs = set(rows.buckets())
        self.is_lost = False

    def launch(self, batch):
        assert batch.bucket in self.programs, "never compiled"
        assert 1 <= len(batch.rows) <= batch.bucket.rows
        if self.is_lost:  # memory of a failed launch went into this one
            return hash_model.Done(RuntimeError("the memory is lost"))
        self.trace.append(batch)
        error = self.fault(batch)
        if batch.bucket.rows > self.most(batch.bucket):
            error = RuntimeError(OUT_OF_MEMORY)
        if error is not None:
            self.lose()
            if self.rng.random() < 0.5:
                raise error
            self.is_lost = True
            return hash_model.Done(error)
        self.spoil()
        match batch.bucket:
            case EncodeBucket(tokens=tokens):
                return hash_model.Done(
                    self.result([self.encode(row, tokens) for row in batch.rows])
                )
            case BeginBucket():
                (row,) = batch.rows
                assert row.is_fresh and self.fits(row, batch.bucket)
                self.latents[row.stay.slot] = begun(row.request)
                return hash_model.Done(self.result([RowResult()]))
            case ModulateBucket() as bucket:
                assert len({row.stay.slot for row in batch.rows}) == len(batch.rows)
                rows = [self.modulate(row, bucket) for row in batch.rows]
                return hash_model.Done(self.result(rows))
            case StepBucket() as bucket:
                assert len({row.stay.slot for row in batch.rows}) == len(batch.rows)
                rows = [self.step(row, bucket) for row in batch.rows]
                return hash_model.Done(self.result(rows, num_steps=1))
            case DecodeBucket() as bucket:
                return hash_model.Done(
                    self.result([self.decode(row, bucket) for row in batch.rows])
                )

    def result(self, rows, num_steps=0):
        return LaunchResult(rows=tuple(rows), num_steps=num_steps)

    def encode(self, row, tokens):
        assert len(row.ids) <= tokens
        self.captions[row.entry] = embedded(row.ids)
        return RowResult()

    def modulate(self, row, bucket):
        one, windows = row.request, self.windows
        assert bucket.num_passes == 1 + (windows.by_caption and one.image.is_guided)
        self.modulations[row.stay.slot] = [
            modulated(one, row.step + i, self.captions_of(row), windows.by_caption)
            for i in range(windows.steps)
        ]
        return RowResult()

    def captions_of(self, row):
        return [self.captions[entry] for entry in row.stay.entries]

    def step(self, row, bucket):
        one, stay = row.request, row.stay
        assert self.fits(row, bucket) and one.image.is_guided == bucket.is_guided
        assert (one.image.residual_diff_threshold > 0) == bucket.is_cached
        texts = [one.prompt_ids, *([one.image.negative_ids] if bucket.is_guided else [])]
        assert all(len(ids) <= bucket.tokens for ids in texts)
        assert len(stay.entries) == len(texts)
        assert row.is_fresh == (row.step == 0 and one.image.latents is None)
        latents = begun(one) if row.is_fresh else self.latents[stay.slot]
        captions = self.captions_of(row)
        if self.windows is not None:
            found = self.modulations[stay.slot][row.place]
            assert found == modulated(one, row.step, captions, self.windows.by_caption)
        latents = self.latents[stay.slot] = advanced(latents, row.step, one, captions)
        self.clean[stay.slot] = clean(latents)
        is_invalid = one.seed == INVALID_SEED and row.step == 1
        # A step cache skips every second step here.
        skipped = bucket.is_cached and row.step % 2
        return RowResult(nfe=1, num_skipped=int(skipped), is_invalid=is_invalid)

    def decode(self, row, bucket):
        assert self.fits(row, bucket)
        value = self.clean[row.stay.slot]
        if bucket.output != "latent":
            value = picture(value)
        is_invalid = row.request.seed == INVALID_OUTPUT_SEED
        if row.is_final:
            return RowResult(product=value, is_invalid=is_invalid)
        frames = (Frame(step=row.step, value=value),)
        return RowResult(frames=frames, is_invalid=is_invalid)

    def fits(self, row, bucket):
        return (row.request.image.height, row.request.image.width) == (bucket.height, bucket.width)

    def lose(self):
        for memory in (self.captions, self.latents, self.clean):
            memory.update({key: self.rng.getrandbits(64) for key in memory})
        self.modulations.clear()

    def spoil(self):
        """Overwrites what the host says is free."""
        for slot in self.rows.live.free_slots:
            self.latents[slot] = self.clean[slot] = self.rng.getrandbits(64)
            self.modulations.pop(slot, None)
        for entry in self.rows.captions._free:
            self.captions[entry] = self.rng.getrandbits(64)

    def begin_round(self):
        pass

    def interrupt(self):
        pass

    def reset(self):
        self.lose()
        self.is_lost = False


BUCKETS = ImageBuckets(
    rows=(1, 2, 4),
    encode_rows=(1, 2, 4),
    decode_rows=(1, 2),
    tokens=(8, 16, 32),
    encode_tokens=64,
    sizes=(SMALL, WIDE, LARGE),
    most_rows=image_buckets.rows_by_pixels(4 * 64 * 64),
    most_decode_rows=image_buckets.rows_by_pixels(2 * 64 * 128),
    image_tokens=lambda height, width: height * width,  # captions of all lengths share steps
)
LIMITS = limits.ImageLimits(
    size_multiple=16,
    latent_shape=lambda height, width: (2, height // 32, width // 32),
    max_side=128,
    max_steps=50,
)


def build(
    rng, *, running=6, num_entries=8, overlaps=True, delay_s=0.0, clock=None, buckets=BUCKETS,
    fault=lambda batch: None, most=lambda bucket: 99,
):  # fmt: skip
    """Returns (engine core, its device)."""
    config = ImageRowConfig(
        max_running_requests=running,
        buckets=buckets,
        limits_of_images=LIMITS,
        num_entries=num_entries,
        start_delay_s=delay_s,
    )
    rows = ImageRows(config, **({} if clock is None else {"now": clock}))
    device = Device(rows, rng, fault, most)
    made = Scheduler(rows)
    core = EngineCore(made, device, max_total_tokens=1, overlaps=overlaps)
    return core, device


NAMES = itertools.count()


def ask(
    steps=4, *, size=SMALL, prompt=(1, 2, 3), negative=None, scale=0.0, seed=0, partial=0,
    latents=None, output="image", name=None, arrival_s=0.0,
):  # fmt: skip
    """Returns a request; `negative` makes it a guided one."""
    height, width = size
    return Request(
        request_id=name or str(next(NAMES)),
        prompt_ids=list(prompt),
        sampling=sampling_params.SamplingParams(),
        max_new_tokens=1,
        seed=seed,
        arrival_s=arrival_s,
        image=image_params.ImageParams(
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=scale,
            is_guided=negative is not None,
            negative_ids=negative,
            partial_images=partial,
            latents=latents,
            output=output,
        ),
    )


def latents_of(size, start=0):
    shape = LIMITS.latent_shape(*size)
    return (start + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def random_prompt(rng):
    """Returns one of a few captions, of any length."""
    number = rng.randrange(12)
    return tuple(range(number, number + (3, 8, 9, 20, 32)[number % 5]))


def random_ask(rng, seed, *, size=None, outputs=("image", "image", "latent")):
    size = size or rng.choice([SMALL, SMALL, SMALL, WIDE, LARGE])
    is_guided = rng.random() < 0.3
    return ask(
        rng.choice([1, 2, 3, 4, 8, 20]),
        size=size,
        prompt=random_prompt(rng),
        negative=random_prompt(rng) if is_guided else None,
        scale=rng.choice([1.5, 4.0]) if is_guided else 0.0,
        seed=seed,
        partial=rng.choice([0, 0, 0, 1, 3]),
        latents=latents_of(size, seed) if rng.random() < 0.2 else None,
        output=rng.choice(outputs),
    )


class Client:
    """What requests are told, each thing once."""

    def __init__(self):
        self.frames, self.products, self.errors = {}, {}, {}

    def take(self, commits):
        for commit in commits:
            name = commit.request.request_id
            assert name not in self.products and name not in self.errors, "told after its end"
            assert commit.new_token_ids == []
            mine = self.frames.setdefault(name, {})
            for frame in commit.frames:
                assert frame.step > max(mine, default=0), "previews come once and in order"
                mine[frame.step] = frame.value
            if commit.finish is None:
                assert commit.product is None
            elif commit.finish.kind == "abort":
                self.errors[name] = commit.finish.message
            else:
                assert commit.finish.kind == "stop" and commit.finish.finished_len == 0
                self.products[name] = commit.product


def run(core, client=None, most=10_000):
    """Steps until no request is live; returns what the requests were told."""
    client = client or Client()
    for _ in range(most):
        if not core.has_work:
            return client
        client.take(core.step())
        assert not core.pause_s, "a pause that nothing asked for"
    raise AssertionError(f"requests never end: {core.scheduler.stats()}")


def kinds(trace):
    """Returns the launches of a trace as words: encode, begin, modulate, step, decode."""
    return [batch.bucket.name for batch in trace]
