"""What a built engine for images reports about itself; `info.py` is its counterpart for text."""

from __future__ import annotations

import dataclasses
from typing import Any

from jdllm.device import devices
from jdllm.engine.images import requests
from jdllm.engine.start.images import build
from jdllm.options.config import TEXT_OPTIONS, EngineConfig
from jdllm.runner.launch import compile_counter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageStats:
    """A snapshot; the metrics have the same names (`server/edge/metrics.py`). A GB is 1e9 bytes.

    `denoising_steps_total` counts the steps of all images, `skipped_steps_total` those of them that
    left out most of the transformer, `denoise_launches_total` the launches that took them together;
    `merged_steps_total` are the steps of launches that had several images. `other_launches_total`
    encode captions, make modulation and decode images. `batch_occupancy` is the share of real rows
    in the steps' launches. `first_use_compiles_total` are programs that were compiled after the
    start, and `num_waiting_compiles` those that are still to come. `peak_memory_usage_gb` is the
    most that JAX has held on the device since the process began; 0 where it does not count (CPU).
    With several devices (`tp_size`) memory is that of each, and the peak that of the fullest.
    """

    num_running_reqs: int
    num_queue_reqs: int
    max_running_requests: int
    num_requests_total: int
    num_aborted_requests_total: int
    images_total: int
    prompt_tokens_total: int
    denoising_steps_total: int
    skipped_steps_total: int
    merged_steps_total: int
    denoise_launches_total: int
    other_launches_total: int
    batch_occupancy: float
    padding_fraction: float
    caption_cache_hits_total: int
    caption_cache_misses_total: int
    caption_cache_evictions_total: int
    num_cached_captions: int
    preemptions_total: int
    device_idle_seconds_total: float
    device_seconds_total: float
    first_use_compiles_total: int
    num_waiting_compiles: int
    jit_compiles_total: int
    jit_compile_seconds: float
    startup_time_seconds: float
    weight_memory_usage_gb: float
    host_weight_memory_usage_gb: float
    latent_memory_usage_gb: float
    step_cache_memory_usage_gb: float
    modulation_memory_usage_gb: float
    caption_memory_usage_gb: float
    launch_memory_usage_gb: float
    peak_memory_usage_gb: float
    tp_size: int = 1


def stats(built: build.BuiltImages) -> ImageStats:
    """Returns a snapshot; approximate while a launch is in flight."""
    core, captions, compiles = built.core, built.rows.captions, compile_counter.COUNTER
    scheduled, counters = core.scheduler.stats(), core.counters
    return ImageStats(
        num_running_reqs=scheduled.num_running,
        num_queue_reqs=scheduled.num_queued,
        max_running_requests=built.num_slots,
        num_requests_total=counters.requests,
        num_aborted_requests_total=counters.aborted_requests,
        images_total=counters.products,
        prompt_tokens_total=counters.prompt_tokens,
        denoising_steps_total=counters.denoising_steps,
        skipped_steps_total=counters.skipped_steps,
        merged_steps_total=counters.merged_forwards,
        denoise_launches_total=counters.decode_launches,
        other_launches_total=counters.prefill_launches,
        batch_occupancy=counters.batch_occupancy,
        padding_fraction=counters.padding_fraction,
        caption_cache_hits_total=captions.hits,
        caption_cache_misses_total=captions.misses,
        caption_cache_evictions_total=captions.evictions,
        num_cached_captions=captions.num_cached,
        preemptions_total=scheduled.total_preemptions,
        device_idle_seconds_total=core.clock.idle_s,
        device_seconds_total=core.clock.total_s,
        first_use_compiles_total=built.first_use.num_compiled,
        num_waiting_compiles=built.first_use.num_waiting,
        jit_compiles_total=compiles.count - built.compiles_at_ready,
        jit_compile_seconds=compiles.seconds,
        startup_time_seconds=built.startup_s,
        host_weight_memory_usage_gb=built.host_weight_bytes / 1e9,
        weight_memory_usage_gb=built.weight_bytes / 1e9,
        latent_memory_usage_gb=built.slot_bytes / 1e9,
        step_cache_memory_usage_gb=built.residual_bytes / 1e9,
        modulation_memory_usage_gb=built.window_bytes / 1e9,
        caption_memory_usage_gb=built.caption_bytes / 1e9,
        launch_memory_usage_gb=built.runner.step_bytes / 1e9,
        peak_memory_usage_gb=(devices.peak_memory(built.config.tp_size) or 0) / 1e9,
        tp_size=built.config.tp_size,
    )


def server_info(
    built: build.BuiltImages, config: EngineConfig, facts: requests.ImageFacts
) -> dict[str, Any]:
    """Returns resolved options, the pipeline, kernels, device and one `internal_states` entry."""
    options = dataclasses.asdict(config).items()
    return {
        **{name: value for name, value in options if name not in TEXT_OPTIONS},
        "pipeline": built.folder.class_name,
        "image_facts": dataclasses.asdict(facts),
        "kernels": built.runner.kernels,
        "device": str(built.device),
        "device_facts": dataclasses.asdict(built.device),
        "devices": devices.describe(built.device.num_devices),
        "internal_states": [dataclasses.asdict(stats(built))],
    }


def model_info(
    built: build.BuiltImages, config: EngineConfig, facts: requests.ImageFacts
) -> dict[str, Any]:
    """Returns what SGLang's `/model_info` returns; the sampling is what requests get by default."""
    return {
        "model_path": config.model_path,
        "served_model_name": config.served_model_name,
        "tokenizer_path": config.model_path,
        "is_generation": True,
        "preferred_sampling_params": {
            "width": facts.default_width,
            "height": facts.default_height,
            "num_inference_steps": facts.default_steps,
            "guidance_scale": facts.default_guidance_scale,
            "true_cfg_scale": facts.default_true_cfg_scale,
            "max_sequence_length": facts.default_max_sequence_length,
        },
        "weight_version": "default",
        "model_type": "image",
        "architectures": [built.folder.class_name],
    }
