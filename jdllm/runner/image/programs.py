"""What the kinds of image launches compute, for any pipeline.

A step treats each row as if it were alone: its noise, noise levels, captions and guidance are its
own. So rows at different timesteps and with different numbers of steps share a launch.

Letters: R rows, W words, K steps of a window of modulation, P passes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jdllm.models.images import pixels, step_cache
from jdllm.pipelines import interface
from jdllm.runner.image import state
from jdllm.runner.image.inputs import (
    BeginInputs,
    DecodeInputs,
    EncodeInputs,
    ModulateInputs,
    StepInputs,
)
from jdllm.runner.launch import program
from jdllm.runner.launch.rows import select
from jdllm.scheduler.rows.image import buckets

# The parts of the memory.
CAPTIONS, SLOTS, RESIDUALS, MODULATIONS = "captions", "slots", "residuals", "modulations"
_BYTES_PER_WORD = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Which rows are invalid: something that they computed is infinite or NaN.

    `is_skipped`: which rows of a step with a step cache left out most of the transformer.
    Decoded rows have a value: latents float32 [R, ...], images float32 [R, H, W, 3] from 0 to 1, or
    images of 8 bits as words [R, W] of four bytes, the first byte the lowest.
    """

    is_invalid: Bool[Array, " R"]
    value: Float32[Array, "R ..."] | Int32[Array, "R W"] | None = None
    is_skipped: Bool[Array, " R"] | None = None


def encode(
    pipeline: interface.Pipeline,
    params: program.Params,
    memory: program.Memory,
    inputs: EncodeInputs,
) -> tuple[program.Memory, Outputs]:
    """Writes what the pipeline keeps of captions into their entries."""
    captions = pipeline.encode(params, inputs.ids, inputs.lens)
    held: state.Captions = memory[CAPTIONS]
    finite = [_is_finite(leaf) for leaf in jax.tree.leaves(captions)]
    is_invalid = ~jnp.stack(finite).all(axis=0)
    return {CAPTIONS: held.write(inputs.entry, captions)}, Outputs(is_invalid=is_invalid)


def begin(
    params: program.Params, memory: program.Memory, inputs: BeginInputs
) -> tuple[program.Memory, Outputs]:
    """Writes given latents into slots."""
    del params
    slots: state.Slots = memory[SLOTS]
    latents = state.write(slots.latents, inputs.slot, inputs.latents)
    written = dataclasses.replace(slots, latents=latents)
    return {SLOTS: written}, Outputs(is_invalid=~_is_finite(inputs.latents))


def modulate(
    pipeline: interface.Pipeline,
    caption_shapes: Any,
    params: program.Params,
    memory: program.Memory,
    inputs: ModulateInputs,
) -> tuple[program.Memory, Outputs]:
    """Writes the modulation of the next steps of rows: one product for all of their levels."""
    ahead = _ahead(pipeline)
    num_passes, R = inputs.entry.shape
    K = inputs.sigma.shape[1]
    held: state.Captions = memory[CAPTIONS]
    windows: state.SlotModulations = memory[MODULATIONS]

    def for_each_step(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, K, axis=0), tree)

    made = ahead.make(
        params,
        _for_each_pass(inputs.sigma.reshape(-1), num_passes),
        for_each_step(held.read(inputs.entry.reshape(-1), caption_shapes)),
        for_each_step(_for_each_pass(inputs.guidance, num_passes)),
    )
    made = jax.tree.map(lambda leaf: leaf.reshape(num_passes * R, K, *leaf.shape[1:]), made)
    places = state.places(inputs.slot, num_passes, passes_of(ahead))
    finite = jnp.stack([_is_finite(leaf) for leaf in jax.tree.leaves(made)]).all(axis=0)
    return (
        {CAPTIONS: held, MODULATIONS: windows.write(places, made)},
        Outputs(is_invalid=~finite.reshape(num_passes, R).all(axis=0)),
    )


def passes_of(ahead: interface.ModulationAhead) -> int:
    """Returns for how many captions a slot has a window."""
    return state.MOST_PASSES if ahead.by_caption else 1


def step(
    pipeline: interface.Pipeline,
    bucket: buckets.StepBucket,
    params: program.Params,
    memory: program.Memory,
    inputs: StepInputs,
) -> tuple[program.Memory, Outputs]:
    """Takes one Euler step of each row, and keeps the clean latents that it points to."""
    shape = pipeline.latent_shape(bucket.height, bucket.width)
    slots: state.Slots = memory[SLOTS]
    held: state.Captions = memory[CAPTIONS]
    kept = state.read(slots.latents, inputs.slot, shape)
    x = select(inputs.is_fresh, noise(inputs.seed, shape), kept)
    num_passes, R = inputs.entry.shape

    def for_each_pass(tree: Any) -> Any:
        return _for_each_pass(tree, num_passes)

    modulation = None if pipeline.modulation is None else _modulation(pipeline, memory, inputs)
    cache = _cache(pipeline, bucket, memory, inputs)
    velocity = pipeline.predict(
        params,
        for_each_pass(x),
        for_each_pass(inputs.sigma),
        held.read(inputs.entry.reshape(-1), pipeline.caption_shapes(bucket.tokens)),
        inputs.lens.reshape(-1),
        for_each_pass(inputs.guidance),
        (bucket.height, bucket.width),
        modulation=modulation,
        cache=cache,
    )
    if bucket.is_guided:
        velocity = pipeline.guide(velocity[:R], velocity[R:], inputs.sigma, inputs.guidance)
    clean = x - _per_row(inputs.sigma, x) * velocity
    x = x + _per_row(inputs.next_sigma - inputs.sigma, x) * velocity
    written = state.Slots(
        latents=state.write(slots.latents, inputs.slot, x),
        clean=state.write(slots.clean, inputs.slot, clean),
    )
    is_invalid = ~(_is_finite(x) & _is_finite(clean))
    left = {**memory, SLOTS: written}
    if cache is None:
        return left, Outputs(is_invalid=is_invalid)
    assert cache.kept is not None and cache.is_skipped is not None, "`predict` went through it"
    residuals: state.SlotResiduals = memory[RESIDUALS]
    left[RESIDUALS] = residuals.write(inputs.slot, num_passes, cache.kept)
    return left, Outputs(is_invalid=is_invalid, is_skipped=cache.is_skipped[:R])


def _modulation(
    pipeline: interface.Pipeline, memory: program.Memory, inputs: StepInputs
) -> interface.Modulation:
    """Returns what modulates this step of all passes."""
    ahead = _ahead(pipeline)
    num_passes = len(inputs.entry)
    own = min(num_passes, passes_of(ahead))
    windows: state.SlotModulations = memory[MODULATIONS]
    places = state.places(inputs.slot, own, passes_of(ahead))
    found = windows.read(places, _for_each_pass(inputs.place, own))
    return _for_each_pass(found, num_passes // own)


def _ahead(pipeline: interface.Pipeline) -> interface.ModulationAhead:
    assert pipeline.modulation is not None, "else there is no such launch"
    return pipeline.modulation


def _for_each_pass(tree: Any, num_passes: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf] * num_passes), tree)


def _cache(
    pipeline: interface.Pipeline,
    bucket: buckets.StepBucket,
    memory: program.Memory,
    inputs: StepInputs,
) -> step_cache.StepCache | None:
    """Returns the step cache of a launch, None if its bucket has none."""
    asked = inputs.cache
    if asked is None:
        return None
    num_passes, R = inputs.entry.shape
    tokens = pipeline.image_tokens(bucket.height, bucket.width)
    residuals: state.SlotResiduals = memory[RESIDUALS]
    held = residuals.read(inputs.slot, num_passes, (tokens, pipeline.transformer_width))

    def skips(change: Float32[Array, " P*R"]) -> Bool[Array, " P*R"]:
        # Both forwards of a guided row do the same: guidance would enlarge what one of them lacks.
        changes = change.reshape(num_passes, R).max(axis=0)
        of_rows = (changes < asked.threshold) & ~asked.is_first
        return jnp.tile(of_rows | asked.is_padding, num_passes)

    return step_cache.StepCache(held, skips)


def decode(
    pipeline: interface.Pipeline,
    bucket: buckets.DecodeBucket,
    params: program.Params,
    memory: program.Memory,
    inputs: DecodeInputs,
) -> tuple[program.Memory, Outputs]:
    """Returns the clean latents of rows, or their images."""
    slots: state.Slots = memory[SLOTS]
    shape = pipeline.latent_shape(bucket.height, bucket.width)
    clean = state.read(slots.clean, inputs.slot, shape)
    if bucket.output == "latent":
        return {SLOTS: slots}, Outputs(is_invalid=~_is_finite(clean), value=clean)
    images = pipeline.decode(params, clean, (bucket.height, bucket.width))
    value = _words(images) if bucket.output == "image" else pixels.to_float(images)
    return {SLOTS: slots}, Outputs(is_invalid=~_is_finite(images), value=value)


def noise(seed: UInt32[Array, "R 2"], shape: tuple[int, ...]) -> Float32[Array, "R ..."]:
    """Returns the latents at noise level 1, which depend on a row's seed and its size alone."""

    def of_row(words: UInt32[Array, " 2"]) -> Float32[Array, " ..."]:
        return jax.random.normal(jax.random.wrap_key_data(words), shape, jnp.float32)

    return jax.vmap(of_row)(seed)


def _words(images: Float32[Array, "R H W 3"]) -> Int32[Array, "R W"]:
    """Returns pixels of 8 bits as words: outputs of launches are bool or have 32 bits."""
    flat = pixels.to_uint8(images).reshape(len(images), -1, _BYTES_PER_WORD)
    return jax.lax.bitcast_convert_type(flat, jnp.int32)


def _is_finite(x: Array) -> Bool[Array, " R"]:
    return jnp.isfinite(x).reshape(len(x), -1).all(axis=1)


def _per_row(values: Float32[Array, " R"], x: Array) -> Array:
    return values.reshape(-1, *(1,) * (x.ndim - 1))
