"""Builds a running core from options: loads, chooses sizes, compiles, and reports progress.

This module decides once, at start, what `EngineConfig` leaves open. The result is kept as a
resolved config, which the log and `/server_info` show.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.checkpoint import source, tokenizer_checks
from jdllm.device import devices, facts, sharding
from jdllm.engine.core import EngineCore
from jdllm.engine.start import (
    algorithm_defaults,
    kinds,
    sampling_defaults,
    sizing,
    startup,
    weights_fit,
)
from jdllm.engine.tokenizer import Tokenizer, of_model
from jdllm.kv_cache.pool import PoolConfig
from jdllm.models import loading, registry, split
from jdllm.options import sampling_params
from jdllm.options.config import EngineConfig
from jdllm.runner import model_runner
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import compile_counter, peer_buffers
from jdllm.scheduler.rows import interface
from jdllm.scheduler.scheduler import Scheduler
from jdllm.spec import ModelSpec

logger = logging.getLogger(__name__)

DEFAULT_QUEUE = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Everything an `Engine` holds."""

    config: EngineConfig
    device: facts.DeviceFacts
    core: EngineCore
    runner: model_runner.ModelRunner
    model: loading.LoadedModel
    model_dir: pathlib.Path
    spec: ModelSpec
    tokenizer: Tokenizer | None
    default_sampling: sampling_params.SamplingParams
    default_dllm: sampling_params.DllmParams
    algorithms: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    sizes: sizing.Sizes
    startup_s: float
    compiles_at_ready: int


def build(config: EngineConfig, progress: startup.StartupProgress) -> Built:
    """Loads the model, chooses the size of the KV pool and compiles every bucket."""
    began = time.monotonic()
    enable_compilation_cache()
    progress.enter("load")
    model_dir = source.resolve_text(
        config.model_path, revision=config.revision, download_dir=config.download_dir
    )
    config.check_for("text")
    generation_config = source.read_optional_json(model_dir / "generation_config.json")
    # What can be refused without the weights is refused before they are read.
    if config.tp_size > 1:
        devices.prepare_several()
    mesh = sharding.make_mesh(config.tp_size, devices.every())
    device = devices.facts(config.tp_size)
    hf_config = source.read_json(model_dir / source.CONFIG_NAME)
    dtype = _dtype(config.dtype, hf_config, device)
    block_size = config.algorithm_options().get("block_size")
    model_config = loading.read_config(model_dir, block_size=block_size)
    spec = model_config.spec
    kind = kinds.kind_of(spec)
    shards = split.shards_of(model_config, config.tp_size, config.ep_size)
    algorithms, default_dllm = algorithm_defaults.choose(config, generation_config, spec)
    default_sampling = sampling_defaults.default_sampling(
        generation_config,
        filters=any(lookup.TABLE[name].takes_filters for name in algorithms),
        draws_its_own_way=any(lookup.TABLE[name].has_own_temperature for name in algorithms),
    )
    uses_draft_adapter = not config.disable_draft_adapter and any(
        lookup.TABLE[name].uses_draft_adapter for name in algorithms
    )
    if uses_draft_adapter and config.load_format != "dummy":
        model_config = loading.with_draft_adapter(model_config, model_dir)
    weights_fit.check(
        model_config,
        shards,
        loading.resolve_dtype(dtype, hf_config),
        None if device.is_cpu else device.memory_bytes,
    )
    shapes = sizing.choose_shapes(config, spec, kind.rows.defaults, device)
    tokenizer = of_model(config, model_dir, mask_token_id=spec.diffusion.mask_token_id)
    _check_vocabulary(tokenizer, spec)
    model = loading.load(
        model_dir,
        dtype=dtype,
        load_format=config.load_format,
        seed=config.random_seed,
        shards=shards,
        mesh=mesh,
        config=model_config,
    )
    kv_dtype = str(model.params["norm.weight"].dtype)
    # Before the sizes are chosen, since they take memory.
    peers = None
    if mesh is not None:
        row_bytes = spec.hidden_size * model.params["norm.weight"].dtype.itemsize
        logits_of_block = spec.diffusion.block_size * spec.vocab_size // shards.tp
        peers = peer_buffers.connect(
            mesh,
            row_bytes=row_bytes,
            # For rows that draw from a part of the vocabulary.
            words=logits_of_block if kind.exchanges_logits else 0,
            is_disabled=config.disable_custom_all_reduce,
        )
    local_spec = split.local_config(model_config, shards).spec
    sizes = sizing.choose_sizes(config, local_spec, shapes, model.params, kv_dtype, device)
    rows = kind.rows.build(_row_config(config, spec, sizes, device, kind, tokenizer))
    step_config = StepConfig(
        spec=spec,
        pool=_pool_config(local_spec, sizes, kv_dtype, mesh),
        context_length=sizes.context_length,
        num_slots=sizes.max_running_requests,
        algorithms=algorithms,
        max_launch_steps=config.num_continuous_decode_steps,
        # With shifted logits, the forward that persists a block gives the next one its first token.
        fuses_commits=not config.disable_fused_commit and not spec.diffusion.is_shifted,
        num_ranks=shards.tp,
    )
    runner = model_runner.ModelRunner(
        loading.serving_params(model.params, jnp.dtype(kv_dtype)),
        kind.device(model.graphdef, step_config, device),
        device=device,
        peers=peers,
    )
    buckets = rows.buckets()
    progress.enter("compile", total=len(buckets))
    runner.compile(buckets, progress.advance)
    sizes = dataclasses.replace(sizes, step_bytes=runner.step_bytes)
    try:
        sizing.check_memory(sizes, devices.memory_use(shards.tp))
    except errors.ConfigError:
        runner.release()
        raise
    logger.debug(
        "memory: weights %.2f GB, KV %.2f GB, the hungriest launch %.2f GB",
        sizes.weight_bytes / 1e9,
        sizes.kv_bytes / 1e9,
        sizes.step_bytes / 1e9,
    )
    if shards.is_split:
        logger.info(
            "%s over %d devices: all_reduce %s", shards, shards.tp, runner.kernels["all_reduce"]
        )
    scheduler = Scheduler(
        rows, max_queued_requests=_queue_limit(config), policy=config.schedule_policy
    )
    return Built(
        config=dataclasses.replace(
            _resolved(
                config, model_dir, dtype, algorithms, default_dllm, sizes, tokenizer is not None
            ),
            ep_size=shards.ep,
        ),
        device=device,
        core=EngineCore(
            scheduler,
            runner,
            max_total_tokens=sizes.num_pages * sizes.page_size,
            overlaps=not config.disable_overlap_schedule,
            decode_log_interval=config.decode_log_interval,
        ),
        runner=runner,
        model=model,
        model_dir=model_dir,
        spec=spec,
        tokenizer=tokenizer,
        default_sampling=default_sampling,
        default_dllm=default_dllm,
        algorithms=algorithms,
        eos_token_ids=_eos_token_ids(spec, tokenizer),
        sizes=sizes,
        startup_s=time.monotonic() - began,
        compiles_at_ready=compile_counter.COUNTER.count,
    )


def enable_compilation_cache() -> None:
    """Keeps compiled steps across starts, unless the user configured a cache."""
    # JAX adds its options to `config` at import, where no type checker sees them.
    found = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if found is None:
        cache = pathlib.Path.home() / ".cache" / "jdllm" / "compilation"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _dtype(wanted: str, hf_config: dict[str, Any], device: facts.DeviceFacts) -> str:
    """Returns the dtype to load: "auto" means the checkpoint's, but float32 on a CPU.

    CPUs emulate bfloat16 matmuls; float32 is several times faster there. A checkpoint that names
    no dtype is refused there, too.
    """
    loading.resolve_dtype(wanted, hf_config)
    return "float32" if wanted == "auto" and device.is_cpu else wanted


def _check_vocabulary(tokenizer: Tokenizer | None, spec: ModelSpec) -> None:
    if tokenizer is None or len(tokenizer) <= spec.vocab_size:
        return
    # One that no vocabulary has is added at its end.
    places = [
        f" ({place}={token!r} has the id {token_id})"
        for place, token in tokenizer_checks.special_tokens(
            pathlib.Path(tokenizer.path).expanduser()
        )
        if (token_id := tokenizer.token_id(token)) is not None and token_id >= spec.vocab_size
    ]
    raise errors.ConfigError(
        f"the tokenizer at {tokenizer.path} has {len(tokenizer)} tokens, the model only "
        f"vocab_size={spec.vocab_size}; they do not belong together{''.join(places[:1])}"
    )


def _eos_token_ids(spec: ModelSpec, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the model's end tokens and the chat template's end of turn."""
    ids = dict.fromkeys(spec.diffusion.eos_token_ids)
    if tokenizer is not None:
        # Only the end of turn of its own family: the vocabulary may hold those of others too.
        end_of_turn = registry.family(spec.architecture).end_of_turn
        ends = [tokenizer.eos_token_id]
        if end_of_turn is not None:
            ends.append(tokenizer.token_id(end_of_turn))
        for token_id in ends:
            if token_id is not None:
                ids[token_id] = None
    return tuple(ids)


def _pool_config(
    spec: ModelSpec, sizes: sizing.Sizes, kv_dtype: str, mesh: jax.sharding.Mesh | None
) -> PoolConfig:
    return PoolConfig(
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
        mesh=mesh,
        kv_heads_of_layers=spec.kv_heads_of_layers,
    )


def _row_config(
    config: EngineConfig,
    spec: ModelSpec,
    sizes: sizing.Sizes,
    device: facts.DeviceFacts,
    kind: kinds.KindOfRows,
    tokenizer: Tokenizer | None,
) -> interface.RowConfig:
    shares_prefixes = kind.rows.defaults.shares_prefixes
    return interface.RowConfig(
        max_running_requests=sizes.max_running_requests,
        context_length=sizes.context_length,
        block_size=spec.diffusion.block_size,
        page_size=sizes.page_size,
        num_pages=sizes.num_pages,
        prefill_token_budget=sizes.prefill_token_budget,
        max_prefill_tokens=sizes.max_prefill_tokens,
        decode_steps=config.num_continuous_decode_steps,
        launches_ahead=0 if config.disable_overlap_schedule else 1,
        has_prefix_cache=shares_prefixes and not config.disable_radix_cache,
        is_shifted=spec.diffusion.is_shifted,
        is_causal=spec.diffusion.is_causal,
        device=device,
        # Special tokens are kept here, because a stop string may name one.
        detokenize=(
            None
            if tokenizer is None
            else functools.partial(tokenizer.decode, skip_special_tokens=False)
        ),
    )


def _queue_limit(config: EngineConfig) -> int:
    return DEFAULT_QUEUE if config.max_queued_requests is None else config.max_queued_requests


def _resolved(
    config: EngineConfig,
    model_dir: pathlib.Path,
    dtype: str,
    algorithms: tuple[str, ...],
    default_dllm: sampling_params.DllmParams,
    sizes: sizing.Sizes,
    has_tokenizer: bool,
) -> EngineConfig:
    options = default_dllm.options
    block_size = config.algorithm_options().get("block_size")
    if block_size is not None:
        options["block_size"] = block_size
    return dataclasses.replace(
        config,
        model_path=config.model_path or str(model_dir),
        tokenizer_path=config.tokenizer_path or str(model_dir),
        served_model_name=(config.served_model_name or config.model_path or source.BUNDLED_MODEL),
        skip_tokenizer_init=not has_tokenizer,
        dtype=dtype,
        context_length=sizes.context_length,
        max_total_tokens=sizes.num_pages * sizes.page_size,
        page_size=sizes.page_size,
        max_running_requests=sizes.max_running_requests,
        max_queued_requests=_queue_limit(config),
        chunked_prefill_size=sizes.prefill_token_budget,
        max_prefill_tokens=sizes.max_prefill_tokens,
        dllm_algorithm=",".join(algorithms),
        dllm_algorithm_config=options,
    )
