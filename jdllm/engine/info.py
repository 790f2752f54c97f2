"""What a built engine reports about itself: numbers, options, facts about the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from jdllm.algorithms import lookup
from jdllm.device import devices
from jdllm.engine.start import build
from jdllm.engine.stats import EngineStats
from jdllm.options import config
from jdllm.runner.launch import compile_counter


def stats(built: build.Built) -> EngineStats:
    """Returns a snapshot; approximate while a launch is in flight."""
    core, sizes = built.core, built.sizes
    scheduled, counters = core.scheduler.stats(), core.counters
    compiles = compile_counter.COUNTER
    return EngineStats(
        num_running_reqs=scheduled.num_running,
        num_queue_reqs=scheduled.num_queued,
        num_used_tokens=scheduled.num_used_pages * sizes.page_size,
        max_total_num_tokens=sizes.num_pages * sizes.page_size,
        max_running_requests=sizes.max_running_requests,
        token_usage=scheduled.token_usage,
        gen_throughput=core.throughput.per_second(),
        cache_hit_rate=scheduled.total_cached_tokens / max(scheduled.total_prompt_tokens, 1),
        prompt_tokens_total=counters.prompt_tokens,
        generation_tokens_total=counters.generation_tokens,
        cached_tokens_total=scheduled.total_cached_tokens,
        num_requests_total=counters.requests,
        num_aborted_requests_total=counters.aborted_requests,
        denoising_steps_total=counters.denoising_steps,
        canvas_positions_total=counters.canvas_positions,
        canvas_full_forwards_total=counters.canvas_full_forwards,
        canvas_forwarded_tokens_total=counters.canvas_forwarded_tokens,
        committed_tokens_total=counters.generation_tokens,
        edited_tokens_total=counters.edited_tokens,
        discarded_tokens_total=counters.discarded_tokens,
        preemptions_total=scheduled.total_preemptions,
        prefill_launches_total=counters.prefill_launches,
        decode_launches_total=counters.decode_launches,
        decode_steps_total=counters.decode_steps,
        padding_fraction=counters.padding_fraction,
        batch_occupancy=counters.batch_occupancy,
        device_idle_seconds_total=core.clock.idle_s,
        device_seconds_total=core.clock.total_s,
        jit_compiles_total=compiles.count - built.compiles_at_ready,
        jit_compile_seconds=compiles.seconds,
        startup_time_seconds=built.startup_s,
        weight_memory_usage_gb=sizes.weight_bytes / 1e9,
        kv_cache_memory_usage_gb=sizes.kv_bytes / 1e9,
        launch_memory_usage_gb=sizes.step_bytes / 1e9,
        tp_size=built.config.tp_size,
        ep_size=built.config.ep_size or 1,
    )


def server_info(built: build.Built) -> dict[str, Any]:
    """Returns resolved options, kernels, devices and one `internal_states` entry."""
    options = dataclasses.asdict(built.config).items()
    return {
        **{name: value for name, value in options if name not in config.IMAGE_OPTIONS},
        "kernels": built.runner.kernels,
        "device": str(built.device),
        "device_facts": dataclasses.asdict(built.device),
        "devices": devices.describe(built.device.num_devices),
        "block_size": built.spec.diffusion.block_size,
        "algorithms": list(built.algorithms),
        "internal_states": [dataclasses.asdict(stats(built))],
    }


def model_info(built: build.Built) -> dict[str, Any]:
    """Returns what SGLang's `/model_info` returns."""
    default = built.default_sampling
    return {
        "model_path": built.config.model_path,
        "served_model_name": built.config.served_model_name,
        "tokenizer_path": built.config.tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": {
            "temperature": default.temperature,
            "top_p": default.top_p,
            "top_k": default.top_k,
            "dllm": {"algorithm": built.default_dllm.algorithm, **built.default_dllm.options},
        },
        "weight_version": "default",
        "model_type": built.spec.model_type,
        "architectures": [built.spec.architecture],
        "context_length": built.sizes.context_length,
        "dllm": {
            "rows": built.spec.diffusion.kind,
            "block_size": built.spec.diffusion.block_size,
            "algorithms": lookup.described(built.algorithms),
        },
    }
