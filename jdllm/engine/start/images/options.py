"""From `EngineConfig` to what a pipeline is built with, and back: what the build has chosen."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.engine.images import checks, requests
from jdllm.engine.start import startup
from jdllm.engine.start.images import build as images
from jdllm.engine.start.images.build import BuiltImages, ImageBuildConfig
from jdllm.options.config import EngineConfig
from jdllm.pipelines import folder
from jdllm.scheduler.rows.image import limits as image_limits


def build_config(config: EngineConfig) -> ImageBuildConfig:
    """Returns the options of the build; finds the pipeline folder, or downloads it.

    Raises a ConfigError for a model that writes text, for options that only such models have, and
    for one that several devices do not have.
    """
    config.check_for("images")
    if config.tp_size > 1 and config.text_encoder_cpu_offload:
        raise errors.ConfigError(
            f"text_encoder_cpu_offload is for one device, not for tp_size={config.tp_size}; "
            "leave it out"
        )
    directory = find(config)
    if not source.is_pipeline(directory):
        raise errors.ConfigError(
            f"{directory} is no image pipeline: it holds no {source.MODEL_INDEX_NAME}; for a model "
            "that writes text use jdllm.Engine or jdllm.LLM"
        )
    return ImageBuildConfig(
        directory=directory,
        load_format=config.load_format,
        variant=config.variant,
        dtype=config.dtype,
        quantization=config.quantization,
        tp_size=config.tp_size,
        random_seed=config.random_seed,
        mem_fraction_static=config.mem_fraction_static,
        max_running_requests=config.max_running_requests,
        max_queued_requests=(
            images.DEFAULT_QUEUE
            if config.max_queued_requests is None
            else config.max_queued_requests
        ),
        batching_max_size=config.batching_max_size,
        batching_delay_ms=config.batching_delay_ms,
        logs_batching=config.enable_batching_metrics,
        batching_rules=config.batching_rules(),
        model_path=config.model_path or directory.name,
        sizes=_sizes(config.warmup_resolutions),
        has_step_cache=config.enable_step_cache,
        offloads_text_encoders=config.text_encoder_cpu_offload,
        max_pixels=config.max_image_pixels or image_limits.DEFAULT_MAX_PIXELS,
        disable_overlap_schedule=config.disable_overlap_schedule,
        decode_log_interval=config.decode_log_interval,
    )


def build(
    config: EngineConfig, progress: startup.StartupProgress
) -> tuple[EngineConfig, BuiltImages]:
    """Builds a pipeline; returns the options with what was chosen, too."""
    made = images.build(build_config(config), progress)
    return resolved(config, made), made


def find(config: EngineConfig) -> pathlib.Path:
    """Returns the directory of the model; without a name it is the bundled image model."""
    name = config.model_path
    if name is None:
        name = source.BUNDLED_IMAGE_MODELS[0]
    return source.resolve(
        name,
        revision=config.revision,
        download_dir=config.download_dir,
        variant=config.variant,
        check_index=folder.check_index,
    )


def resolved(config: EngineConfig, built: BuiltImages) -> EngineConfig:
    """Returns the options with what the build has chosen."""
    path = str(built.folder.path)
    return dataclasses.replace(
        config,
        model_path=config.model_path or path,
        served_model_name=config.served_model_name or config.model_path or built.folder.path.name,
        dtype=built.dtype,
        max_running_requests=built.num_slots,
        max_queued_requests=built.config.max_queued_requests,
        batching_max_size=built.buckets.rows[-1],
        warmup_resolutions=",".join(f"{width}x{height}" for height, width in built.buckets.sizes),
        max_image_pixels=built.limits.max_pixels,
    )


def facts(built: BuiltImages) -> requests.ImageFacts:
    """Returns what a built pipeline says of itself."""
    pipeline, limits = built.pipeline, built.limits
    defaults, options = pipeline.defaults, pipeline.options
    height, width = built.default_size
    multiple = pipeline.size_multiple
    unit = pipeline.latent_shape(multiple, multiple)
    is_packed = len(unit) == 2
    longest = built.buckets.tokens[-1] - pipeline.prefix_tokens
    longest = min(longest, defaults.longest_sequence_length)
    return requests.ImageFacts(
        family=built.folder.class_name.removesuffix("Pipeline"),
        size_multiple=multiple,
        default_height=height,
        default_width=width,
        max_side=limits.max_side,
        max_pixels=limits.max_pixels,
        default_steps=defaults.num_inference_steps,
        max_steps=limits.max_steps,
        default_max_sequence_length=min(longest, defaults.max_sequence_length),
        max_sequence_length=longest,
        latent_channels=unit[1] // 4 if is_packed else unit[0],
        packs_latents=is_packed,
        default_guidance_scale=defaults.guidance_scale,
        default_true_cfg_scale=defaults.true_cfg_scale,
        cfg_switch=options.cfg_switch,
        has_cfg_limits=options.has_cfg_limits,
        has_step_cache=built.config.has_step_cache,
        compiled_size=min(built.buckets.sizes, key=math.prod),
    )


def _sizes(resolutions: str | None) -> tuple[tuple[int, int], ...] | None:
    """Returns the (height, width) of a list of `WIDTHxHEIGHT`, separated by commas."""
    if resolutions is None:
        return None
    sizes = []
    for text in resolutions.split(","):
        try:
            found = checks.size_of(text.strip())
        except errors.RequestError:
            found = None
        if found is None:
            raise errors.ConfigError(
                f"warmup_resolutions: {errors.quote(text)} must be WIDTHxHEIGHT, such as 1024x1024"
            )
        sizes.append((found[1], found[0]))
    return tuple(dict.fromkeys(sizes))
