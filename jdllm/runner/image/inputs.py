"""What image launches get from the host: a `ScheduleBatch` becomes padded numpy arrays.

Padding rows have slots, or entries to write, past the last, so that nothing of them is written; no
two rows have the same. Else they are captions of one token and steps from noise level 1 to 1.

The arrays are numpy's on the host and traced in the launch, hence `Any` in their types.

Letters: R rows, L tokens of a padded caption, K steps of a window of modulation; P is 2 for guided
rows (the caption's part, then the negative one's), else 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt32

from jdllm.options import image_params
from jdllm.pipelines import interface
from jdllm.runner import row_options
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.rows.image import buckets, stay


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodeInputs:
    """Captions, and the entries of the store that they go to."""

    ids: Int32[Any, "R L"]
    lens: Int32[Any, " R"]
    entry: Int32[Any, " R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeginInputs:
    """Given latents, and the slots that they go to."""

    latents: Float32[Any, "R ..."]
    slot: Int32[Any, " R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModulateInputs:
    """The noise levels of each row's window, and what else its modulation depends on."""

    slot: Int32[Any, " R"]
    entry: Int32[Any, "P R"]
    sigma: Float32[Any, "R K"]
    guidance: interface.Guidance


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheInputs:
    """Which rows may leave out blocks: those whose change is below their threshold.

    The first step of an image computes in any case. Padding rows never compute.
    """

    is_first: Bool[Any, " R"]
    is_padding: Bool[Any, " R"]
    threshold: Float32[Any, " R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step of each row, from noise level `sigma` to `next_sigma`.

    The latents of a fresh row are drawn from its seed. `lens` are the tokens of the captions.
    `place` is that of the step in the window of modulation, if there is one. `cache` is for steps
    with a step cache.
    """

    slot: Int32[Any, " R"]
    is_fresh: Bool[Any, " R"]
    seed: UInt32[Any, "R 2"]
    entry: Int32[Any, "P R"]
    lens: Int32[Any, "P R"]
    sigma: Float32[Any, " R"]
    next_sigma: Float32[Any, " R"]
    place: Int32[Any, " R"]
    guidance: interface.Guidance
    cache: CacheInputs | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The slots whose clean latents are decoded."""

    slot: Int32[Any, " R"]


def encode(batch: ScheduleBatch, *, num_entries: int) -> EncodeInputs:
    """Returns the inputs of an encode launch."""
    R, L = batch.bucket.rows, batch.bucket.tokens
    ids, lens = np.zeros((R, L), np.int32), np.ones((R,), np.int32)
    entry = _past(num_entries, R)
    for i, row in enumerate(batch.rows):
        assert isinstance(row, buckets.CaptionRow)
        ids[i, : len(row.ids)] = row.ids
        lens[i], entry[i] = len(row.ids), row.entry
    return EncodeInputs(ids=ids, lens=lens, entry=entry)


def begin(batch: ScheduleBatch, shape: tuple[int, ...], *, num_slots: int) -> BeginInputs:
    """Returns the inputs of a launch that writes given latents of this shape."""
    R = batch.bucket.rows
    latents, slot = np.zeros((R, *shape), np.float32), _past(num_slots, R)
    for i, row in enumerate(batch.rows):
        given = stay.image_of(row.request).latents
        assert given is not None, "a row without given latents is begun by its first step"
        latents[i], slot[i] = given, row.stay.slot
    return BeginInputs(latents=latents, slot=slot)


def modulate(
    batch: ScheduleBatch, pipeline: interface.Pipeline, *, num_slots: int, num_steps: int
) -> ModulateInputs:
    """Returns the inputs of a launch for windows of `num_steps` steps.

    Behind the last step of an image stands the level after it, 0, which no step reads.
    """
    bucket = batch.bucket
    assert isinstance(bucket, buckets.ModulateBucket)
    R, P = bucket.rows, bucket.num_passes
    inputs = ModulateInputs(
        slot=_past(num_slots, R),
        entry=np.zeros((P, R), np.int32),
        sigma=np.zeros((R, num_steps), np.float32),
        guidance=_no_guidance(R),
    )
    for i, row in enumerate(batch.rows):
        assert isinstance(row, buckets.ModulateRow)
        assert isinstance(row.stay, stay.ImageStay)  # which it was planned with
        image = stay.image_of(row.request)
        inputs.slot[i] = row.stay.slot
        inputs.entry[:, i] = row.stay.entries[:P]
        sigmas = _sigmas(pipeline, image)[row.step : row.step + num_steps]
        inputs.sigma[i, : len(sigmas)] = sigmas
        _fill_guidance(inputs.guidance, i, image)
    return inputs


def step(batch: ScheduleBatch, pipeline: interface.Pipeline, *, num_slots: int) -> StepInputs:
    """Returns the inputs of a step."""
    bucket = batch.bucket
    assert isinstance(bucket, buckets.StepBucket)
    R, P = bucket.rows, 1 + bucket.is_guided
    cache = _no_cache(R) if bucket.is_cached else None
    inputs = StepInputs(
        slot=_past(num_slots, R),
        is_fresh=np.zeros((R,), bool),
        seed=np.zeros((R, 2), np.uint32),
        entry=np.zeros((P, R), np.int32),
        lens=np.ones((P, R), np.int32),
        sigma=np.ones((R,), np.float32),
        next_sigma=np.ones((R,), np.float32),
        place=np.zeros((R,), np.int32),
        guidance=_no_guidance(R),
        cache=cache,
    )
    for i, row in enumerate(batch.rows):
        assert isinstance(row, buckets.StepRow)
        assert isinstance(row.stay, stay.ImageStay)  # which it was planned with
        image = stay.image_of(row.request)
        inputs.slot[i], inputs.is_fresh[i] = row.stay.slot, row.is_fresh
        inputs.seed[i] = row_options.seed_words(row.request.seed)
        inputs.entry[:, i] = row.stay.entries
        inputs.lens[:, i] = [len(ids) for ids in stay.captions_of(row.request)]
        levels = _sigmas(pipeline, image)[row.step : row.step + 2]
        inputs.sigma[i], inputs.next_sigma[i] = levels
        inputs.place[i] = row.place
        _fill_guidance(inputs.guidance, i, image)
        if cache is not None:
            cache.is_first[i], cache.is_padding[i] = row.step == 0, False
            cache.threshold[i] = image.residual_diff_threshold
    return inputs


def decode(batch: ScheduleBatch, *, num_slots: int) -> DecodeInputs:
    """Returns the inputs of a decode launch."""
    slot = _past(num_slots, batch.bucket.rows)
    slot[: len(batch.rows)] = [row.stay.slot for row in batch.rows]
    return DecodeInputs(slot=slot)


def _sigmas(pipeline: interface.Pipeline, image: image_params.ImageParams) -> np.ndarray:
    return pipeline.sigmas(image.num_inference_steps, image.height, image.width)


def _past(count: int, rows: int) -> np.ndarray:
    return count + np.arange(rows, dtype=np.int32)


def _no_guidance(rows: int) -> interface.Guidance:
    def zeros() -> np.ndarray:
        return np.zeros((rows,), np.float32)

    return interface.Guidance(
        guidance_scale=zeros(),
        true_cfg_scale=zeros(),
        cfg_truncation=zeros(),
        cfg_normalization=zeros(),
    )


def _no_cache(rows: int) -> CacheInputs:
    return CacheInputs(
        is_first=np.zeros((rows,), bool),
        is_padding=np.ones((rows,), bool),
        threshold=np.zeros((rows,), np.float32),
    )


def _fill_guidance(guidance: interface.Guidance, i: int, image: image_params.ImageParams) -> None:
    guidance.guidance_scale[i] = image.guidance_scale
    guidance.true_cfg_scale[i] = image.true_cfg_scale
    guidance.cfg_truncation[i] = image.cfg_truncation
    guidance.cfg_normalization[i] = image.cfg_normalization
