"""Flags of SGLang and vLLM that are no options here: what happens instead, or what to use.

A command line that was written for SGLang or vLLM should start here unless it asks for something
that does not exist. `ALIASES` are other names of our options. A flag in `SPEED` tells the other
engine how to be fast, and is accepted; the log says what happens instead. Any other flag in these
tables is refused, and the error says what replaces it. `NEUTRAL_VALUES` are the values at which a
refused flag asks for nothing. Names have underscores here, and belong to SGLang 0.5 and to vLLM
0.10 and later.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jdllm import errors

# Other names of options.
ALIASES: dict[str, str] = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "tensor_parallel_size": "tp_size",
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction_static",
    "device_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_queued_reqs": "max_queued_requests",
    "seed": "random_seed",
    "uvicorn_log_level": "log_level_http",
}
# Switches of vLLM that say the opposite of a switch of ours; with `no_` they say the same.
OPPOSITES: dict[str, str] = {
    "enable_prefix_caching": "disable_radix_cache",
    "async_scheduling": "disable_overlap_schedule",
}
# Other spellings of an option's values.
VALUES: dict[str, dict[str, str]] = {"dtype": {"half": "float16", "float": "float32"}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Flags with one answer: switches, flags with one value, flags with a list of values."""

    instead: str
    switches: str = ""
    valued: str = ""
    lists: str = ""

    def flags(self) -> Iterator[tuple[str, int | str | None]]:
        """Yields each name with argparse's `nargs`."""
        yield from ((name, 0) for name in self.switches.split())
        yield from ((name, None) for name in self.valued.split())
        yield from ((name, "+") for name in self.lists.split())


SPEED: tuple[Group, ...] = (
    Group(
        instead="kernels are chosen by device and shape; the log shows the choice",
        switches="disable_cascade_attn disable_flashinfer_autotune enable_flashinfer_autotune "
        "enable_flashinfer_mla enable_fused_qk_norm_rope flashinfer_mla_disable_ragged "
        "disable_shared_experts_fusion enforce_shared_experts_fusion "
        "triton_attention_reduce_in_fp32",
        valued="attention_backend prefill_attention_backend decode_attention_backend "
        "sampling_backend moe_runner_backend moe_backend bf16_gemm_backend linear_backend "
        "triton_attention_num_kv_splits triton_attention_split_tile_size",
    ),
    Group(
        instead="every shape is compiled at start, and on a GPU a launch is one CUDA graph",
        switches="disable_cuda_graph disable_prefill_cuda_graph disable_decode_cuda_graph "
        "disable_cuda_graph_padding disable_piecewise_cuda_graph enable_piecewise_cuda_graph "
        "enable_cudagraph_gc enable_torch_compile enforce_eager",
        valued="cuda_graph_max_bs cuda_graph_max_bs_decode cuda_graph_max_bs_prefill "
        "cuda_graph_max_seq_len_prefill cuda_graph_config cuda_graph_backend_decode "
        "cuda_graph_backend_prefill max_cudagraph_capture_size max_seq_len_to_capture "
        "torch_compile_max_bs compilation_config optimization_level",
        lists="cuda_graph_bs cuda_graph_bs_decode cuda_graph_bs_prefill cudagraph_capture_sizes",
    ),
    Group(
        instead="prompts are always cut and packed, up to --chunked-prefill-size per launch",
        switches="enable_mixed_chunk disable_chunked_prefix_cache enable_chunked_prefill",
        valued="schedule_conservativeness scheduler_recv_interval prefill_max_requests "
        "prefill_decode_interval long_prefill_token_threshold max_num_partial_prefills",
    ),
    Group(
        instead="one process uses one GPU: there is nothing to communicate",
        switches="disable_custom_all_reduce enable_nccl_nvls enable_symm_mem enable_mscclpp "
        "enable_torch_symm_mem enable_p2p_check pre_warm_nccl enable_two_batch_overlap "
        "enable_single_batch_overlap enable_flashinfer_allreduce_fusion "
        "enforce_disable_flashinfer_allreduce_fusion",
        valued="nccl_port dist_timeout distributed_executor_backend load_balance_method "
        "flashinfer_allreduce_fusion_backend",
    ),
    Group(
        instead="text is tokenised in threads of this one process",
        switches="enable_tokenizer_batch_encode disable_tokenizer_batch_decode "
        "enable_dynamic_batch_tokenizer disable_frontend_multiprocessing",
        valued="tokenizer_worker_num detokenizer_worker_num renderer_num_workers "
        "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
        "batch_notify_size",
    ),
    Group(
        instead="text is sent as soon as a block, or what precedes the first mask, is final",
        valued="stream_interval",
    ),
    Group(
        instead="weights are read tensor by tensor, straight to the device",
        switches="weight_loader_disable_mmap weight_loader_prefetch_checkpoints "
        "weight_loader_drop_cache_after_load use_tqdm_on_load",
        valued="weight_loader_prefetch_num_threads safetensors_load_strategy "
        "startup_weight_load_mode max_parallel_loading_workers",
    ),
    Group(
        instead="/health answers 503 when the engine hangs; let a supervisor restart the process",
        valued="watchdog_timeout soft_watchdog_timeout",
    ),
    Group(instead="an idle engine waits without using the CPU", switches="sleep_on_idle"),
    Group(
        instead="a preempted request is computed again; nothing is swapped to the host",
        valued="swap_space",
    ),
    Group(instead="rows never wait for one another (always so)", switches="dllm_fdfo"),
    Group(
        instead="requests are not logged unless --log-level-http is info",
        switches="disable_log_requests disable_uvicorn_access_log",
    ),
    Group(
        instead="answers always say how many prompt tokens came from the prefix cache",
        switches="enable_cache_report enable_prompt_tokens_details",
    ),
    Group(
        instead="requests with a grammar or a JSON schema are answered 400",
        valued="grammar_backend guided_decoding_backend structured_outputs_config",
    ),
)

_NO_TLS = "put a proxy that ends TLS in front of the server"
_NO_REPLICAS = "run one process per replica behind a load balancer"
_NO_EXPERTS = "experts are not sharded yet; leave it out"
_NO_CONFIG_CHANGE = "change the config.json of a copy of the checkpoint"
_NO_GPUS = "run one process per GPU behind a load balancer"
_NO_SPECULATION = "diffusion models have no draft model; use --dllm-algorithm"
_NO_LORA = "LoRA is not supported"
_NO_QUANT = "quantised weights are not supported; use --dtype"
_NO_TIERS = "the prefix cache stays on the device; leave it out"
_NO_TOOLS = "answers are not parsed for tool calls or reasoning; leave it out"
_NO_GRPC = "the server speaks HTTP; use --host and --port"
_NO_LOG = "--log-level-http info logs every request"
_DEFAULTS = "put defaults into the checkpoint's generation_config.json"

REFUSED: dict[str, str] = {
    "no_dllm_fdfo": "there is no lock-step mode: rows never wait for one another",
    "no_enable_chunked_prefill": "long prompts are always cut; use --chunked-prefill-size",
    "block_size": "use --page-size for tokens per KV page; the length of a diffusion block "
    "belongs to the model",
    "device": "JAX takes a GPU if it has one; JAX_PLATFORMS=cpu in the environment takes the CPU",
    "quantization": _NO_QUANT,
    "quantization_param_path": _NO_QUANT,
    "modelopt_quant": _NO_QUANT,
    "kv_cache_dtype": "the KV pool has the dtype of the model; use --dtype",
    "dp_size": _NO_REPLICAS,
    "data_parallel_size": _NO_REPLICAS,
    "attn_dp_size": _NO_REPLICAS,
    "enable_dp_attention": _NO_REPLICAS,
    "api_server_count": _NO_REPLICAS,
    "ep_size": _NO_EXPERTS,
    "ep": _NO_EXPERTS,
    "expert_parallel_size": _NO_EXPERTS,
    "enable_expert_parallel": _NO_EXPERTS,
    "enable_ep_moe": _NO_EXPERTS,
    "moe_a2a_backend": _NO_EXPERTS,
    "pp_size": _NO_GPUS,
    "pipeline_parallel_size": _NO_GPUS,
    "dcp_size": _NO_GPUS,
    "decode_context_parallel_size": _NO_GPUS,
    "nnodes": _NO_GPUS,
    "node_rank": _NO_GPUS,
    "dist_init_addr": _NO_GPUS,
    "nccl_init_addr": _NO_GPUS,
    "base_gpu_id": "CUDA_VISIBLE_DEVICES in the environment chooses the GPU",
    "cpu_offload_gb": "the model must fit on the device; leave it out",
    "enable_lora": _NO_LORA,
    "max_loras": _NO_LORA,
    "radix_eviction_policy": "the prefix cache evicts what was used least recently",
    "enable_hierarchical_cache": _NO_TIERS,
    "enable_hicache": _NO_TIERS,
    "enable_lmcache": _NO_TIERS,
    "kv_transfer_config": _NO_TIERS,
    "json_model_override_args": _NO_CONFIG_CHANGE,
    "hf_overrides": _NO_CONFIG_CHANGE,
    "model_impl": "models have one implementation here; leave it out",
    "tokenizer_mode": "the checkpoint's own tokenizer is loaded; leave it out",
    "tokenizer_backend": "the tokenizers library is used; leave it out",
    "model_loader_extra_config": "use --load-format",
    "is_embedding": "a diffusion model gives no embeddings",
    "sampling_defaults": _DEFAULTS,
    "generation_config": _DEFAULTS,
    "override_generation_config": _DEFAULTS,
    "preferred_sampling_params": _DEFAULTS,
    "allow_auto_truncate": "a prompt that is too long is answered 400",
    "incremental_streaming_output": "/generate streams cumulative text; /v1/completions streams "
    "what is new",
    "stream_response_default_include_usage": "ask with stream_options.include_usage",
    "enable_force_include_usage": "ask with stream_options.include_usage",
    "enable_deterministic_inference": "use --dtype float32: then no request changes another's "
    "output",
    "reasoning_parser": _NO_TOOLS,
    "tool_call_parser": _NO_TOOLS,
    "enable_auto_tool_choice": _NO_TOOLS,
    "tool_server": _NO_TOOLS,
    "log_requests": _NO_LOG,
    "log_requests_level": _NO_LOG,
    "log_requests_format": _NO_LOG,
    "enable_log_requests": _NO_LOG,
    "allowed_origins": "use --cors-allow-origins, separated by commas",
    "shutdown_timeout": "use --drain-timeout",
    "root_path": "let the proxy in front strip the prefix",
    "fastapi_root_path": "let the proxy in front strip the prefix",
    "uds": _NO_GRPC,
    "grpc_mode": _NO_GRPC,
    "smg_grpc_mode": _NO_GRPC,
    "grpc_port": _NO_GRPC,
    "enable_http2": "put a proxy that speaks HTTP/2 in front of the server",
    "enable_trace": "there are metrics, with --enable-metrics, and no traces",
    "otlp_traces_endpoint": "there are metrics, with --enable-metrics, and no traces",
}
REFUSED_PREFIXES: dict[str, str] = {
    "speculative_": _NO_SPECULATION,
    "spec_": _NO_SPECULATION,
    "lora_": _NO_LORA,
    "max_lora": _NO_LORA,
    "disaggregation_": "prefill and decode are not separated",
    "hicache_": _NO_TIERS,
    "ssl_": _NO_TLS,
    "mm_": "only text models are served",
    "limit_mm_": "only text models are served",
    "enable_multimodal": "only text models are served",
    "watermark_": "watermarks are not supported",
}
# Values, as text, at which a refused flag asks for what happens anyway.
NEUTRAL_VALUES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cuda", "gpu"),
    "kv_cache_dtype": ("auto",),
    "cpu_offload_gb": ("0",),
    "moe_a2a_backend": ("none",),
    "node_rank": ("0",),
    "base_gpu_id": ("0",),
    "radix_eviction_policy": ("lru",),
    "json_model_override_args": ("{}",),
    "hf_overrides": ("{}",),
    "model_loader_extra_config": ("{}",),
    "model_impl": ("auto",),
    "tokenizer_mode": ("auto",),
    "tokenizer_backend": ("huggingface",),
    "sampling_defaults": ("model",),
    "generation_config": ("auto",),
    "disaggregation_mode": ("null",),
    **{
        name: ("1",)
        for name in (
            *("dp_size", "data_parallel_size", "attn_dp_size", "api_server_count", "nnodes"),
            *("ep_size", "ep", "expert_parallel_size", "pp_size", "pipeline_parallel_size"),
            *("dcp_size", "decode_context_parallel_size"),
        )
    },
}

_SPEED_FLAGS = {name: group.instead for group in SPEED for name, _ in group.flags()}


def spelled(name: str) -> str:
    """Returns the flag of a name."""
    return "--" + name.replace("_", "-")


def names() -> set[str]:
    """Returns the names of all flags that `add` adds."""
    return {*_SPEED_FLAGS, *NEUTRAL_VALUES}


def refusal(name: str) -> str | None:
    """Returns what replaces a flag that is refused at any value, None for any other flag."""
    return None if name in names() else _instead(name)


def note(name: str, value: Any) -> str | None:
    """Returns what happens instead of a flag of another engine, None for any other flag.

    Raises `ConfigError` if the flag asks for something that does not exist here.
    """
    if name in _SPEED_FLAGS:
        return f"{spelled(name)}: {_SPEED_FLAGS[name]}"
    instead = _instead(name)
    if instead is None:
        return None
    if str(value) not in NEUTRAL_VALUES.get(name, ()):
        shown = "" if value is None else f" {str(value)[:60]}"
        raise errors.ConfigError(f"{spelled(name)}{shown} is not supported: {instead}")
    return f"{spelled(name)} {value}: so it is anyway"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that are accepted; the help does not list them."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for group in SPEED:
        for name, nargs in group.flags():
            how = {"action": "store_true"} if nargs == 0 else {"nargs": nargs}
            parser.add_argument(spelled(name), dest=name, **how, **hidden)
    for name in NEUTRAL_VALUES:
        parser.add_argument(spelled(name), dest=name, **hidden)


def take(flags: dict[str, Any]) -> list[str]:
    """Removes the flags of `add` from parsed ones; returns what happens instead of each.

    Raises `ConfigError` for a value that asks for something that does not exist here.
    """
    found = [name for name in flags if name in names()]
    notes = [note(name, flags.pop(name)) for name in found]
    return [line for line in notes if line is not None]


def markdown_table() -> str:
    """Returns the table of `docs/flags.md`: accepted flags and what happens instead."""
    lines = ["| accepted, without effect | what happens instead |", "|---|---|"]
    for group in SPEED:
        flags = ", ".join(f"`{spelled(name)}`" for name, _ in group.flags())
        lines.append(f"| {flags} | {group.instead} |")
    return "\n".join(lines)


def markdown_aliases(also: Mapping[str, str]) -> str:
    """Returns the table of `docs/flags.md` that shows other names of options."""
    lines = ["| also | option |", "|---|---|"]
    lines += [f"| `{spelled(k)}` | `{spelled(of)}` |" for k, of in {**ALIASES, **also}.items()]
    lines += [f"| `{spelled('no_' + k)}` | `{spelled(of)}` |" for k, of in OPPOSITES.items()]
    return "\n".join(lines)


def _instead(name: str) -> str | None:
    for prefix, reason in REFUSED_PREFIXES.items():
        if name.startswith(prefix):
            return REFUSED.get(name, reason)
    return REFUSED.get(name)
