"""The device side of image rows: slots, a store of captions, and a program for each bucket."""

from __future__ import annotations

import dataclasses
import functools
import math

from jdllm import errors
from jdllm.pipelines import interface
from jdllm.runner.image import inputs, programs, results, state
from jdllm.runner.launch import program
from jdllm.scheduler.batch import Bucket
from jdllm.scheduler.rows.image import buckets


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageKindConfig:
    """The memory of image rows: how many of them there are, and how large they may be.

    `max_pixels` are those of one image, `max_tokens` those of the longest compiled caption. With
    `has_step_cache` there is memory for the residuals of all slots. `window_steps` are those whose
    modulation a slot holds, if the pipeline has it made before the steps.
    """

    num_slots: int
    num_entries: int
    max_pixels: int
    max_tokens: int
    has_step_cache: bool = False
    window_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_slots", "num_entries", "max_pixels", "max_tokens", "window_steps"):
            if (value := getattr(self, name)) < 1:
                raise errors.ConfigError(f"{name}={value} must be at least 1")


class ImageKind:
    """Programs of one loaded pipeline."""

    def __init__(self, pipeline: interface.Pipeline, config: ImageKindConfig):
        _check(pipeline, config)
        self._pipeline = pipeline
        self._config = config

    def create_memory(self) -> program.Memory:
        """Returns slots and a store without content."""
        config, pipeline = self._config, self._pipeline
        elements = latent_elements(pipeline, config.max_pixels)
        captions = pipeline.caption_shapes(config.max_tokens)
        memory: program.Memory = {
            programs.SLOTS: state.empty_slots(config.num_slots, elements),
            programs.CAPTIONS: state.Captions.empty(config.num_entries, captions),
        }
        if config.has_step_cache:
            memory[programs.RESIDUALS] = state.SlotResiduals.empty(
                config.num_slots,
                residual_elements(pipeline, config.max_pixels),
                pipeline.parts.dtype,
            )
        if (ahead := pipeline.modulation) is not None:
            memory[programs.MODULATIONS] = state.SlotModulations.empty(
                config.num_slots, programs.passes_of(ahead), config.window_steps, ahead.shapes
            )
        return memory

    def program(self, bucket: Bucket) -> program.Program:
        """Returns the program of a launch of images."""
        pipeline, num_slots = self._pipeline, self._config.num_slots
        match bucket:
            case buckets.EncodeBucket():
                num_entries = self._config.num_entries
                return program.Program(
                    step=functools.partial(programs.encode, pipeline),
                    uses=(programs.CAPTIONS,),
                    inputs=lambda batch, _: inputs.encode(batch, num_entries=num_entries),
                    results=results.of_encode,
                )
            case buckets.BeginBucket(height=height, width=width):
                shape = pipeline.latent_shape(height, width)
                return program.Program(
                    step=programs.begin,
                    uses=(programs.SLOTS,),
                    inputs=lambda batch, _: inputs.begin(batch, shape, num_slots=num_slots),
                    results=results.of_begin,
                )
            case buckets.ModulateBucket():
                num_steps = self._config.window_steps
                captions = pipeline.caption_shapes(self._config.max_tokens)
                return program.Program(
                    step=functools.partial(programs.modulate, pipeline, captions),
                    uses=(programs.CAPTIONS, programs.MODULATIONS),
                    inputs=lambda batch, _: inputs.modulate(
                        batch, pipeline, num_slots=num_slots, num_steps=num_steps
                    ),
                    results=results.of_modulate,
                )
            case buckets.StepBucket(is_cached=is_cached):
                modulations = () if pipeline.modulation is None else (programs.MODULATIONS,)
                residuals = (programs.RESIDUALS,) if is_cached else ()
                return program.Program(
                    step=functools.partial(programs.step, pipeline, bucket),
                    uses=(programs.SLOTS, programs.CAPTIONS, *modulations, *residuals),
                    inputs=lambda batch, _: inputs.step(batch, pipeline, num_slots=num_slots),
                    results=functools.partial(results.of_step, pipeline),
                )
            case buckets.DecodeBucket():
                return program.Program(
                    step=functools.partial(programs.decode, pipeline, bucket),
                    uses=(programs.SLOTS,),
                    inputs=lambda batch, _: inputs.decode(batch, num_slots=num_slots),
                    results=results.of_decode,
                )
        raise ValueError(f"{bucket=} is not a bucket of images")


def latent_elements(pipeline: interface.Pipeline, pixels: int) -> int:
    """Returns the most elements that the latents of an image of at most `pixels` have."""
    side = pipeline.size_multiple
    return pixels // side**2 * math.prod(pipeline.latent_shape(side, side))


def residual_elements(pipeline: interface.Pipeline, pixels: int) -> int:
    """Returns the elements of the image tokens of an image of at most `pixels`."""
    return pixels // pipeline.size_multiple**2 * pipeline.transformer_width


def _check(pipeline: interface.Pipeline, config: ImageKindConfig) -> None:
    multiple, most = pipeline.caption_multiple, pipeline.max_caption_tokens
    prefix = pipeline.prefix_tokens
    own = config.max_tokens - prefix
    if own < 1 or own % multiple or own > most:
        raise errors.ConfigError(
            f"captions of max_tokens={config.max_tokens} must have a multiple of {multiple} "
            f"tokens, at most {most}" + (f", after the {prefix} before them" if prefix else "")
        )
    if config.has_step_cache and not pipeline.options.has_step_cache:
        raise errors.ConfigError(
            f"enable_step_cache: {type(pipeline).__name__} has no step cache; leave it out"
        )
    if config.max_pixels < pipeline.size_multiple**2:
        raise errors.ConfigError(
            f"max_pixels={config.max_pixels} must be at least {pipeline.size_multiple**2}"
        )
