"""Flags of SGLang and vLLM that are no options here: what happens instead, or what to use.

Those of SGLang's server for image models are in `image_flags.py`.

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
from collections.abc import Collection, Iterator
from typing import Any

from jdllm import errors
from jdllm.foreign import image_flags

# Other names of options.
ALIASES: dict[str, str] = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "expert_parallel_size": "ep_size",
    "ep": "ep_size",
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction_static",
    "device_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_queued_reqs": "max_queued_requests",
    "dynamic_batch_max_size": "batching_max_size",
    "dynamic_batch_delay_ms": "batching_delay_ms",
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


BOOLEANS = ("true", "false", "True", "False")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Flags with one answer: switches, flags with one value, flags with a list of values.

    `switches` take no value; `booleans` are switches that may have one, true or false.
    """

    instead: str
    switches: str = ""
    booleans: str = ""
    valued: str = ""
    lists: str = ""

    def flags(self) -> Iterator[tuple[str, int | str | None]]:
        """Yields each name with argparse's `nargs`."""
        yield from ((name, 0) for name in self.switches.split())
        yield from ((name, "?") for name in self.booleans.split())
        yield from ((name, None) for name in self.valued.split())
        yield from ((name, "+") for name in self.lists.split())


SPEED: tuple[Group, ...] = (
    Group(
        instead="kernels are chosen by device and shape; the log shows the choice",
        switches="disable_cascade_attn disable_flashinfer_autotune enable_flashinfer_autotune "
        "enable_flashinfer_mla enable_fused_qk_norm_rope flashinfer_mla_disable_ragged "
        "disable_shared_experts_fusion enforce_shared_experts_fusion "
        "triton_attention_reduce_in_fp32",
        valued="fp8_gemm_runner_backend kernel_config attention_config "
        "attention_backend prefill_attention_backend decode_attention_backend "
        "sampling_backend moe_runner_backend moe_backend bf16_gemm_backend linear_backend "
        "triton_attention_num_kv_splits triton_attention_split_tile_size",
    ),
    Group(
        instead="every shape is compiled at start, and launches on a GPU are CUDA graphs",
        switches="disable_cuda_graph disable_prefill_cuda_graph disable_decode_cuda_graph "
        "disable_cuda_graph_padding disable_piecewise_cuda_graph enable_piecewise_cuda_graph "
        "enable_cudagraph_gc enable_profile_cuda_graph enforce_eager "
        "enable_torch_compile_debug_mode",
        booleans="enable_torch_compile",
        valued="cuda_graph_max_bs cuda_graph_max_bs_decode cuda_graph_max_bs_prefill "
        "cuda_graph_max_seq_len_prefill cuda_graph_config cuda_graph_backend_decode "
        "cuda_graph_backend_prefill max_cudagraph_capture_size max_seq_len_to_capture "
        "cuda_graph_prefill_max_context performance_mode torch_compile_max_bs "
        "compilation_config optimization_level",
        lists="cuda_graph_bs cuda_graph_bs_decode cuda_graph_bs_prefill cudagraph_capture_sizes",
    ),
    Group(
        instead="prompts are always cut and packed, up to --chunked-prefill-size per launch",
        switches="enable_mixed_chunk disable_chunked_prefix_cache enable_chunked_prefill "
        "enable_dynamic_chunking enable_dbo",
        valued="schedule_conservativeness scheduler_recv_interval prefill_max_requests "
        "prefill_decode_interval prefill_schedule_interval "
        "long_prefill_token_threshold max_num_partial_prefills",
    ),
    Group(
        instead="with --tp-size, GPUs write sums into one another's memory, without NCCL; see "
        "--disable-custom-all-reduce",
        switches="enable_nccl_nvls enable_symm_mem enable_mscclpp "
        "enable_torch_symm_mem enable_p2p_check pre_warm_nccl enable_two_batch_overlap "
        "enable_single_batch_overlap enable_flashinfer_allreduce_fusion "
        "enforce_disable_flashinfer_allreduce_fusion enable_dp_lm_head "
        "enable_attn_tp_input_scattered enable_layernorm_sp",
        valued="nccl_port dist_timeout distributed_executor_backend load_balance_method "
        "distributed_timeout_seconds "
        "flashinfer_allreduce_fusion_backend",
    ),
    Group(
        instead="whole experts are spread over the GPUs of --tp-size, unless --ep-size is 1",
        switches="enable_expert_parallel",
    ),
    Group(
        instead="text is tokenised in threads of this one process",
        switches="enable_tokenizer_batch_encode disable_tokenizer_batch_decode "
        "enable_dynamic_batch_tokenizer disable_frontend_multiprocessing "
        "enable_http_worker_reuseport numa_bind",
        valued="tokenizer_worker_num detokenizer_worker_num renderer_num_workers "
        "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
        "batch_notify_size",
        lists="numa_node gc_threshold",
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
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size "
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
        instead="statistics are lines of the log; --log-level warning leaves them out",
        switches="disable_log_stats show_time_cost enable_request_time_stats_logging",
    ),
    Group(
        instead="no running request is stopped for a waiting one",
        switches="disable_priority_preemption",
    ),
    Group(
        instead="a priority is refused where it has no effect",
        switches="abort_on_priority_when_disabled",
    ),
    Group(instead="x-request-id always comes back", switches="enable_request_id_headers"),
    Group(
        instead="K and V outside of windows stay, and prefixes are compared token by token",
        switches="disable_hybrid_kv_cache_manager disable_hybrid_swa_memory",
        valued="prefix_caching_hash_algo",
    ),
    Group(
        instead="answers always say how many prompt tokens came from the prefix cache",
        switches="enable_cache_report enable_prompt_tokens_details",
    ),
    Group(
        instead="requests with a grammar or a JSON schema are answered 400",
        valued="grammar_backend guided_decoding_backend structured_outputs_config",
    ),
    *(Group(instead=why, booleans=found) for why, found in image_flags.SWITCHES.items()),
    *(Group(instead=why, valued=found) for why, found in image_flags.VALUED.items()),
    *(Group(instead=why, lists=found) for why, found in image_flags.LISTS.items()),
)

# What to use instead -> flags that are refused; a name that ends in `*` stands for a family.
REFUSALS: dict[str, str] = {
    "there is no lock-step mode: rows never wait for one another": "no_dllm_fdfo",
    "long prompts are always cut; use --chunked-prefill-size": "no_enable_chunked_prefill",
    "use --page-size for tokens per KV page; a diffusion block is the model's": "block_size",
    "use --dllm-algorithm and --dllm-algorithm-config": "diffusion_config",
    "use --schedule-policy": "scheduling_policy",
    "requests without a priority come last; give them one": "default_priority_value",
    "no running request is stopped for a waiting one": "priority_scheduling_preemption_threshold",
    "use --max-total-tokens": "kv_cache_memory_bytes num_gpu_blocks_override",
    "use --drain-timeout": "shutdown_timeout",
    "use --revision": "tokenizer_revision code_revision",
    "use --load-format": "model_loader_extra_config custom_weight_loader",
    "use --cors-allow-origins, separated by commas": "allowed_origins allowed_methods "
    "allowed_headers allow_credentials",
    "JAX takes a GPU if it has one; JAX_PLATFORMS=cpu in the environment takes the CPU": "device",
    "CUDA_VISIBLE_DEVICES in the environment chooses the GPU": "base_gpu_id gpu_id_step device_ids",
    "put it into HF_TOKEN in the environment": "hf_token",
    "weights are quantised only by --quantization fp8, for images": "quantization_* modelopt_* "
    "quantize_and_serve allow_deprecated_quantization fp4_* mxfp4_*",
    "the KV pool has the dtype of the model; use --dtype": "kv_cache_dtype kv_cache_dtype_*",
    "use --dtype float32: then no request changes another's output": "rl_on_policy_target "
    "enable_deterministic_inference",
    "use --replicas": "dp_size data_parallel_* attn_dp_size "
    "enable_dp_attention enable_dp_attention_* api_server_count dwdp_size moe_dp_size",
    "use --tp-size for the GPUs of one host; run one process per host behind a load balancer": ""
    "pp_* pipeline_parallel_size dcp_* cp_* "
    "decode_context_parallel_size prefill_context_parallel_size attn_cp_size enable_prefill_cp "
    "nnodes node_rank dist_init_addr nccl_init_addr master_* use_ray ray_*",
    "use --ep-size: tp-size (the default) spreads whole experts, 1 slices them": "ep_num_* "
    "ep_dispatch_* expert_* enable_ep_* moe_a2a_backend all2all_backend deepep_* eplb_* "
    "enable_eplb elastic_ep_* "
    "enable_elastic_* init_expert_location max_ep_size moe_dense_tp_size shared_experts_*",
    "the model must fit on the device; leave it out": "cpu_offload_* offload_* kt_* ple_* "
    "enable_paged_experts paged_experts_*",
    "weights stay on the device while the server runs": "enable_memory_saver enable_sleep_mode "
    "sleep_mode_* weight_cache_* enable_weights_cpu_backup",
    "LoRA is not supported": "enable_lora enable_lora_* lora_* max_lora* max_loaded_loras "
    "max_cpu_loras default_mm_loras fully_sharded_loras",
    "diffusion models have no draft model; use --dllm-algorithm": "speculative_* spec_* "
    "decoupled_spec_* enable_multi_layer_eagle",
    "prefill and decode are not separated": "disaggregation_* enable_pdmux pdmux_* "
    "enable_pd_role_switch",
    "the prefix cache evicts what was used least recently": "radix_eviction_*",
    "the prefix cache stays on the device; leave it out": "enable_hierarchical_cache hicache_* "
    "enable_hicache enable_lmcache lmcache_* enable_flexkv flexkv_* radix_cache_backend kv_* "
    "ec_transfer_config",
    "no model that it is for is served": "mamba_* enable_mamba_* linear_attn_* dsa_* dsv4_* swa_* "
    "gdn_* kda_* qsa_* enable_hisparse hisparse_* disable_sliding_window max_mamba_cache_size",
    "images, sound and video are no inputs here": "mm_* limit_mm_* enable_multimodal language_* "
    "encoder_* media_* video_* asr_* allowed_media_domains allowed_local_media_path enable_mm_* "
    "image_processor_*",
    "only generation is served": "is_embedding runner convert pooler_config",
    "change the config.json of a copy of the checkpoint": "json_model_override_args hf_overrides "
    "hf_config_path",
    "models have one implementation here; leave it out": "model_impl model_config_parser "
    "config_format",
    "the checkpoint's own tokenizer is loaded; leave it out": "tokenizer_mode tokenizer_backend",
    "put defaults into the checkpoint's generation_config.json": "sampling_defaults "
    "generation_config override_generation_config preferred_sampling_params",
    "send chat_template_kwargs with the request": "default_chat_template_kwargs",
    "content parts are joined to one text": "chat_template_content_format",
    "a request may not bring its own template": "trust_request_chat_template",
    "a prompt that is too long is answered 400": "allow_auto_truncate",
    "/generate streams cumulative text; /v1/completions streams what is new": ""
    "incremental_streaming_output",
    "ask with stream_options.include_usage": "stream_response_default_include_usage "
    "enable_force_include_usage",
    "ask with return_token_ids or /generate": "return_input_ids return_output_ids "
    "return_tokens_as_token_ids",
    "answers are not parsed for tool calls or reasoning; leave it out": "reasoning_* tool_* "
    "enable_auto_tool_choice enable_strict_thinking response_role",
    "there are no processors of logits": "enable_custom_logit_processor logits_processors",
    "watermarks are not supported": "enable_watermark watermark watermark_*",
    "--log-level-http info logs every request": "log_requests log_requests_* enable_log_requests "
    "enable_log_outputs uvicorn_access_log_* disable_access_log_for_endpoints",
    "metrics are one fixed set, with --enable-metrics": "bucket_* prompt_tokens_buckets "
    "generation_tokens_buckets extra_metric_labels tokenizer_metrics_* export_metrics_* "
    "custom_histogram_buckets enable_metrics_for_all_schedulers",
    "there are metrics, with --enable-metrics, and no traces": "enable_trace otlp_* trace_modules "
    "collect_detailed_traces",
    "there is no dump of requests or tensors": "crash_dump_folder debug_tensor_dump_*",
    "put a proxy that ends TLS in front of the server": "ssl_* enable_ssl_refresh",
    "put a proxy that speaks HTTP/2 in front of the server": "enable_http2 http2_*",
    "let the proxy in front strip the prefix": "root_path fastapi_root_path",
    "the server speaks HTTP; use --host and --port": "uds grpc_* smg_*",
}


def _by_name(ends_in_star: bool) -> dict[str, str]:
    """Returns name -> what to use instead, of single flags or of families (without the star)."""
    tables = (*REFUSALS.items(), *image_flags.REFUSALS.items())
    pairs = [(name, instead) for instead, found in tables for name in found.split()]
    return {name.rstrip("*"): why for name, why in pairs if name.endswith("*") == ends_in_star}


REFUSED, REFUSED_PREFIXES = _by_name(False), _by_name(True)
# Values, as text, at which a refused flag asks for what happens anyway.
NEUTRAL_VALUES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ["dp_size", "data_parallel_size", "attn_dp_size", "api_server_count", "nnodes"]
        + ["pp_size", "pipeline_parallel_size", "dcp_size", "decode_context_parallel_size"],
        ("1",),
    ),
    **dict.fromkeys(["cpu_offload_gb", "node_rank", "base_gpu_id"], ("0",)),
    **dict.fromkeys(["kv_cache_dtype", "model_impl", "model_config_parser"], ("auto",)),
    **dict.fromkeys(["tokenizer_mode", "generation_config"], ("auto",)),
    **dict.fromkeys(
        ["json_model_override_args", "hf_overrides", "model_loader_extra_config"], ("{}",)
    ),
    "device": ("auto", "cuda", "gpu"),
    "moe_a2a_backend": ("none",),
    "radix_eviction_policy": ("lru",),
    "tokenizer_backend": ("huggingface",),
    "sampling_defaults": ("model",),
    "disaggregation_mode": ("null",),
    "scheduling_policy": ("fcfs",),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "config_format": ("auto", "hf"),
    "response_role": ("assistant",),
    "chat_template_content_format": ("auto", "string"),
    **image_flags.NEUTRAL_VALUES,
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


def add(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Adds the flags that are accepted, but for some names; the help does not list them."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for group in SPEED:
        for name, nargs in group.flags():
            if name in without:
                continue
            how: dict[str, Any] = {"nargs": nargs}
            if nargs == 0:
                how = {"action": "store_true"}
            elif nargs == "?":
                how |= {"const": "true", "choices": BOOLEANS}
            parser.add_argument(spelled(name), dest=name, **how, **hidden)
    for name, values in NEUTRAL_VALUES.items():
        is_switch = "false" in values  # alone it asks for the opposite
        how = {"nargs": "?", "const": "true"} if is_switch else {}
        parser.add_argument(spelled(name), dest=name, **how, **hidden)


def take(flags: dict[str, Any], *, without: Collection[str] = ()) -> list[str]:
    """Removes the flags of `add` from parsed ones; returns what happens instead of each.

    Raises `ConfigError` for a value that asks for something that does not exist here.
    """
    found = [name for name in flags if name in names() and name not in without]
    notes = [note(name, flags.pop(name)) for name in found]
    return [line for line in notes if line is not None]


def _instead(name: str) -> str | None:
    for prefix, reason in REFUSED_PREFIXES.items():
        if name.startswith(prefix):
            return REFUSED.get(name, reason)
    return REFUSED.get(name)
