"""Flags of SGLang's server for image and video models that are no options here.

The tables of `flags.py` take these in; names belong to SGLang 0.5.23
(`multimodal_gen/runtime/server_args.py`). Its switches may have a value, true or false.
"""

from __future__ import annotations

# What happens instead -> names; flags that only concern speed or memory, and change no image.
SWITCHES: dict[str, str] = {
    "these weights stay on the device while the server runs": "dit_cpu_offload "
    "dit_layerwise_offload image_encoder_cpu_offload vae_cpu_offload "
    "pin_cpu_memory use_fsdp_inference",
    "a first image is made before the server is ready, unless --skip-server-warmup is set": ""
    "warmup",
    "a guided step computes both forwards in one launch": "enable_cfg_parallel",
    "images above 1024x1024 are decoded in tiles, without seams, others whole": ""
    "vae_tiling vae_slicing vae_sp",
    "weights have one dtype, noise levels and latents are float32": "disable_autocast",
}
VALUED: dict[str, str] = {
    "these weights stay on the device while the server runs": "dit_offload_prefetch_size "
    "dit_layerwise_resident_layers",
    "a first image is made before the server is ready, unless --skip-server-warmup is set": ""
    "warmup_mode warmup_steps",
    "kernels are chosen by device and shape; the log shows the choice": "attention_backend_config "
    "diffusers_attention_backend",
    "one process has all GPUs of a model: processes have nothing to communicate": "scheduler_port",
    "there is one implementation of a pipeline, whatever is asked for": "backend",
}
LISTS: dict[str, str] = {
    "these weights stay on the device while the server runs": "layerwise_offload_components",
}

# What to use instead -> flags that are refused.
REFUSALS: dict[str, str] = {
    "use --tp-size, or one process per GPU behind a load balancer": "num_gpus sp_degree "
    "ulysses_degree ring_degree kv_gather_degree dp_degree cfg_parallel_size hsdp_replicate_dim "
    "hsdp_shard_dim",
    "one process runs the whole pipeline": "disagg_* srt_encoder_url denoiser_*",
    "the folder of a model tells what it makes": "model_type model_id pipeline_class_name "
    "pipeline_config_path model_variant workload_type",
    "put the component into a copy of the pipeline folder": "vae_path transformer_path "
    "transformer_weights_path text_encoder_path",
    "all components have one dtype; use --dtype": "dit_precision vae_precision "
    "text_encoder_precisions image_encoder_precision",
    "use --enable-step-cache, and send residual_diff_threshold with requests": "cache_dit_config "
    "enable_cache_dit enable_teacache",
    "change scheduler/scheduler_config.json of a copy of the pipeline": "flow_shift",
    "send guidance_scale with the request": "embedded_cfg_scale",
    "only images are made, and of texts alone": "boundary_ratio mask_strategy_file_path "
    "comfyui_mode",
    "an answer holds its images, or URLs of them; nothing is written to a disk": "output_path "
    "input_save_path",
    "send prompts to the server, or use jdllm.ImageEngine": "prompt_file_path",
    "the page of every server is at /, unasked": "webui webui_port",
    "weights are quantised only by --quantization fp8": "enable_svdquant quantized_model_path "
    "nunchaku_*",
}
# Values, as text, at which a refused flag asks for what happens anyway.
NEUTRAL_VALUES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [
            "num_gpus",
            "sp_degree",
            "ulysses_degree",
            "ring_degree",
            "kv_gather_degree",
            "dp_degree",
            "cfg_parallel_size",
            "hsdp_replicate_dim",
            "hsdp_shard_dim",
        ],
        ("1",),
    ),
    **dict.fromkeys(
        ["webui", "comfyui_mode", "enable_svdquant", "enable_cache_dit", "enable_teacache"],
        ("false", "False"),
    ),
    **dict.fromkeys(["output_path", "input_save_path"], ("",)),
    "model_type": ("auto", "diffusion"),
    "workload_type": ("t2i",),
    "lora_scale": ("1.0", "1"),
    "lora_nickname": ("default",),
}
