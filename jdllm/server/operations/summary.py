"""What the log says about a server that is ready: a few lines, and a request to try."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jdllm.engine.engine import Engine
    from jdllm.engine.images import requests
    from jdllm.engine.images.engine import ImageEngine
    from jdllm.options import config

Route = Literal["chat", "ids", "image"]

QUESTION = "Tom has 7 apples. He buys 5 more apples. How many apples does he have now?"
SCENE = "a red circle left of a blue square on a white ground"
EXAMPLES: dict[Route, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    "ids": ("/generate", {"input_ids": [0], "sampling_params": {"max_new_tokens": 8}}),
    "image": ("/v1/images/generations", {"prompt": SCENE, "response_format": "url"}),
}
# Addresses to listen on that no client can call -> what a client on this machine calls.
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def engine_lines(engine: Engine) -> list[str]:
    """Returns lines about model, decoding, device, kernels and memory."""
    options, stats, info = engine.config, engine.stats(), engine.server_info()
    algorithms = (options.dllm_algorithm or "").split(",")
    settings = ", ".join(
        f"{k} {v}" for k, v in options.algorithm_options().items() if v is not None
    )
    others = f"; also {', '.join(algorithms[1:])}" if algorithms[1:] else ""
    return [
        f"model {engine.model_name}: {engine.spec.architecture}, {options.dtype}, "
        f"context of {engine.context_length} tokens",
        f"decoding: {algorithms[0]}{f' ({settings})' if settings else ''}{others}",
        f"device {engine.device}; kernels: {kernels(info['kernels'])}",
        f"memory: weights {stats.weight_memory_usage_gb:.2f} GB, "
        f"KV {stats.kv_cache_memory_usage_gb:.2f} GB for {engine.max_total_tokens} tokens, "
        f"launch {stats.launch_memory_usage_gb:.2f} GB; "
        f"at most {engine.max_running_requests} requests at a time",
    ]


def image_engine_lines(engine: ImageEngine) -> list[str]:
    """Returns lines about pipeline, denoising, device, kernels and memory."""
    options, stats, info, facts = engine.config, engine.stats(), engine.server_info(), engine.facts
    guidance = facts.default_guidance_scale
    others = "" if guidance is None else f", guidance {guidance:g}"
    host_gb = stats.host_weight_memory_usage_gb
    host = f"in the host's {host_gb:.2f} GB, " if options.text_encoder_cpu_offload else ""
    cache_gb = stats.step_cache_memory_usage_gb
    cache = f"step cache {cache_gb:.2f} GB, " if options.enable_step_cache else ""
    windows_gb = stats.modulation_memory_usage_gb
    windows = f"modulation {windows_gb:.2f} GB, " if windows_gb else ""
    quantized = f" and {options.quantization}" if options.quantization else ""
    return [
        f"model {engine.model_name}: {info['pipeline']}, {options.dtype}{quantized}, "
        f"makes images of {facts.default_width}x{facts.default_height} unless asked otherwise",
        f"denoising: {facts.default_steps} steps{others}; up to {engine.images_per_step} images in "
        f"a step; compiled for {options.warmup_resolutions}, other sizes at their first use",
        f"device {engine.device}; kernels: {kernels(info['kernels'])}",
        f"memory: weights {stats.weight_memory_usage_gb:.2f} GB, {host}"
        f"latents {stats.latent_memory_usage_gb:.2f} GB, {cache}{windows}"
        f"captions {stats.caption_memory_usage_gb:.2f} GB, "
        f"launch {stats.launch_memory_usage_gb:.2f} GB; "
        f"at most {engine.max_running_requests} images at a time",
    ]


def kernels(lines: Mapping[str, str]) -> str:
    """Returns which implementation the ops run; `lines` has one line for each op."""
    ops: dict[str, list[str]] = {}
    for op, line in lines.items():
        ops.setdefault(line.partition(" ")[0].rstrip(","), []).append(op)
    if len(ops) == 1:
        return next(iter(ops))
    return "; ".join(f"{name} for {', '.join(found)}" for name, found in ops.items())


def url(host: str, port: int) -> str:
    """Returns the address at which a client on this machine finds the server."""
    host = ANY_ADDRESS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def route(engine: Engine | requests.ImageServing) -> Route:
    """Returns the route on which people ask the model."""
    if engine.output_modality == "image":
        return "image"
    has_chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    return "chat" if has_chat else "ids"


def example(address: str, options: config.ServerConfig, route: Route) -> str:
    """Returns a shell command that asks the server something; a key stands in $API_KEY."""
    key = (
        ' -H "Authorization: Bearer $API_KEY"'
        if (options.api_key or options.api_key_file) is not None
        else ""
    )
    path, body = EXAMPLES[route]
    content = "-H 'Content-Type: application/json'"
    return f"curl -s {address}{path}{key} {content} -d {shlex.quote(json.dumps(body))}"
