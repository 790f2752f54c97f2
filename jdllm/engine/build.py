"""From options to a running core: load, size, compile, with progress.

Everything left open in `EngineConfig` is decided here, once, and the result is kept
as a resolved config that can be printed and shown in `/server_info`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import time

import jax

from jdllm import config as config_lib
from jdllm import errors, sampling_params
from jdllm import spec as spec_lib
from jdllm.checkpoint import source
from jdllm.engine import algorithm_defaults, sampling_defaults, sizing, startup
from jdllm.engine import core as core_lib
from jdllm.engine import tokenizer as tokenizer_lib
from jdllm.kv_cache import pool as pool_lib
from jdllm.kv_cache import prefix_cache as prefix_cache_lib
from jdllm.models import loading, registry
from jdllm.runner import model_runner
from jdllm.runner.canvas import packing as canvas_packing
from jdllm.runner.launch import compile_counter
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import buckets as buckets_lib
from jdllm.scheduler import scheduler as scheduler_lib

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
DEFAULT_QUEUE = 4096
# Tokens of a canvas that does not need the sizes of longer ones: a prompt and the 256 new tokens of
# the published evaluations. A third more copies of the layers are compiled for them (16 rows of
# 4,096: 77 for 58).
SHORT_CANVAS = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Everything an `Engine` holds."""

    config: config_lib.EngineConfig
    core: core_lib.EngineCore
    runner: model_runner.ModelRunner
    model: loading.LoadedModel
    model_dir: pathlib.Path
    spec: spec_lib.ModelSpec
    tokenizer: tokenizer_lib.Tokenizer | None
    default_sampling: sampling_params.SamplingParams
    default_dllm: sampling_params.DllmParams
    algorithms: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    sizes: sizing.Sizes
    startup_s: float
    compiles_at_ready: int


def build(config: config_lib.EngineConfig, progress: startup.StartupProgress) -> Built:
    """Loads the model, sizes the KV pool, compiles every bucket."""
    began = time.monotonic()
    _enable_compilation_cache()
    progress.enter("load")
    model_dir = source.resolve(
        config.model_path, revision=config.revision, download_dir=config.download_dir
    )
    generation_config = source.read_optional_json(model_dir / "generation_config.json")
    dtype = _dtype(config.dtype)
    # Everything that can be refused is refused before the weights are read.
    block_size = config.algorithm_options().get("block_size")
    spec = loading.read_spec(model_dir, block_size=block_size)
    model_runner.check_spec(spec)
    algorithms, default_dllm = algorithm_defaults.choose(config, generation_config, spec)
    shapes = sizing.choose_shapes(config, spec)
    tokenizer = _tokenizer(config, model_dir)
    _check_vocabulary(tokenizer, spec)
    model = loading.load(
        model_dir,
        dtype=dtype,
        load_format=config.load_format,
        block_size=block_size,
        seed=config.random_seed,
    )
    kv_dtype = str(model.params["norm.weight"].dtype)
    sizes = sizing.choose_sizes(config, spec, shapes, model.params, kv_dtype)
    pool_config = pool_lib.PoolConfig(
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
    )
    runner = model_runner.ModelRunner(
        model,
        pool_config,
        algorithms=algorithms,
        context_length=sizes.context_length,
        num_slots=sizes.max_running_requests,
        decode_steps=config.num_continuous_decode_steps,
        fuses_commits=not config.disable_fused_commit,
    )
    buckets = _buckets(spec, sizes)
    progress.enter("compile", total=len(buckets.all()))
    runner.compile(buckets.all(), progress.advance)
    sizes = dataclasses.replace(sizes, step_bytes=runner.step_bytes)
    try:
        sizing.check_memory(sizes, sizing.device_memory())
    except errors.ConfigError:
        runner.release()
        raise
    logger.info(
        "memory: weights %.2f GB, KV %.2f GB, the hungriest launch %.2f GB",
        sizes.weight_bytes / 1e9,
        sizes.kv_bytes / 1e9,
        sizes.step_bytes / 1e9,
    )
    scheduler = _scheduler(config, spec, sizes, buckets, tokenizer)
    return Built(
        config=_resolved(
            config, model_dir, dtype, algorithms, default_dllm, sizes, tokenizer is not None
        ),
        core=core_lib.EngineCore(
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
        default_sampling=sampling_defaults.default_sampling(
            generation_config, filters=not spec.diffusion.has_canvas
        ),
        default_dllm=default_dllm,
        algorithms=algorithms,
        eos_token_ids=_eos_token_ids(spec, tokenizer),
        sizes=sizes,
        startup_s=time.monotonic() - began,
        compiles_at_ready=compile_counter.COUNTER.count,
    )


def _enable_compilation_cache() -> None:
    """Keeps compiled steps across starts, unless the user configured a cache."""
    if jax.config.jax_compilation_cache_dir is None:
        cache = pathlib.Path.home() / ".cache" / "jdllm" / "compilation"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _dtype(wanted: str) -> str:
    """Returns the dtype to load: "auto" is the checkpoint's, but float32 on a CPU.

    CPUs emulate bfloat16 matmuls; float32 is several times faster there.
    """
    return "float32" if wanted == "auto" and jax.default_backend() == "cpu" else wanted


def _tokenizer(
    config: config_lib.EngineConfig, model_dir: pathlib.Path
) -> tokenizer_lib.Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    is_bare = not any((model_dir / name).is_file() for name in TOKENIZER_FILES)
    if config.load_format == "dummy" and config.tokenizer_path is None and is_bare:
        logger.warning("%s holds no tokenizer: token ids in, token ids out", model_dir)
        return None
    return tokenizer_lib.Tokenizer(
        config.tokenizer_path or model_dir,
        chat_template=config.chat_template,
        revision=config.revision,
        download_dir=config.download_dir,
    )


def _check_vocabulary(tokenizer: tokenizer_lib.Tokenizer | None, spec: spec_lib.ModelSpec) -> None:
    if tokenizer is not None and len(tokenizer) > spec.vocab_size:
        raise errors.ConfigError(
            f"the tokenizer at {tokenizer.path} has {len(tokenizer)} tokens, the model only "
            f"vocab_size={spec.vocab_size}; they do not belong together"
        )


def _eos_token_ids(
    spec: spec_lib.ModelSpec, tokenizer: tokenizer_lib.Tokenizer | None
) -> tuple[int, ...]:
    """Returns the model's end tokens and the chat template's end of turn."""
    ids = dict.fromkeys(spec.diffusion.eos_token_ids)
    if tokenizer is not None:
        # Only its own family's: others may be in the vocabulary too.
        end_of_turn = registry.family(spec.architecture).end_of_turn
        ends = [tokenizer.eos_token_id]
        if end_of_turn is not None:
            ends.append(tokenizer.token_id(end_of_turn))
        for token_id in ends:
            if token_id is not None:
                ids[token_id] = None
    return tuple(ids)


def _buckets(
    spec: spec_lib.ModelSpec, sizes: sizing.Sizes
) -> buckets_lib.Buckets | buckets_lib.CanvasBuckets:
    """Returns the shapes to compile for the family's kind of rows."""
    if spec.diffusion.has_canvas:
        return buckets_lib.CanvasBuckets.default(
            sizes.max_running_requests,
            sizes.prefill_token_budget,
            sizes.context_length,
            short_row_tokens=_short_row_tokens(),
            whole_tokens=_whole_tokens(sizes.context_length),
        )
    return buckets_lib.Buckets.default(
        sizes.max_running_requests,
        sizes.prefill_token_budget,
        spec.diffusion.block_size,
        padding_is_cheap=jax.default_backend() != "cpu",
    )


def _short_row_tokens() -> int:
    """Returns the length of canvases that have launches of their own; 0 for none."""
    return SHORT_CANVAS if _has_graphs() else 0


def _whole_tokens(context_length: int) -> tuple[int, ...]:
    """Returns the sizes of launches that forward one row's whole canvas."""
    if not _has_graphs():
        return ()
    row_tokens = batch_lib.packed_len(context_length)
    return canvas_packing.forward_sizes(1, row_tokens, padding_is_cheap=False)


def _has_graphs() -> bool:
    """Returns whether launches go through CUDA graphs, which the host prepares for each run."""
    return jax.default_backend() == "gpu"


def _scheduler(
    config: config_lib.EngineConfig,
    spec: spec_lib.ModelSpec,
    sizes: sizing.Sizes,
    buckets: buckets_lib.Buckets | buckets_lib.CanvasBuckets,
    tokenizer: tokenizer_lib.Tokenizer | None,
) -> scheduler_lib.Scheduler:
    is_cached = not config.disable_radix_cache and not spec.diffusion.has_canvas
    queue = DEFAULT_QUEUE if config.max_queued_requests is None else config.max_queued_requests
    assert spec.diffusion.mask_token_id is not None, "checked when the config was parsed"
    return scheduler_lib.Scheduler(
        block_size=spec.diffusion.block_size,
        page_size=sizes.page_size,
        num_pages=sizes.num_pages,
        max_running_requests=sizes.max_running_requests,
        max_queued_requests=queue,
        context_length=sizes.context_length,
        buckets=buckets,
        prefill_token_budget=sizes.prefill_token_budget,
        max_prefill_tokens=sizes.max_prefill_tokens,
        policy=config.schedule_policy,
        prefix_cache=prefix_cache_lib.PrefixCache(sizes.page_size) if is_cached else None,
        decode_steps=config.num_continuous_decode_steps,
        launches_ahead=0 if config.disable_overlap_schedule else 1,
        # A stop string may name a special token, which the shown text leaves out.
        detokenize=(
            None
            if tokenizer is None
            else functools.partial(tokenizer.decode, skip_special_tokens=False)
        ),
    )


def _resolved(
    config: config_lib.EngineConfig,
    model_dir: pathlib.Path,
    dtype: str,
    algorithms: tuple[str, ...],
    default_dllm: sampling_params.DllmParams,
    sizes: sizing.Sizes,
    has_tokenizer: bool,
) -> config_lib.EngineConfig:
    options = {
        name: value
        for name, value in dataclasses.asdict(default_dllm).items()
        if name != "algorithm" and value is not None
    }
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
        max_queued_requests=(
            DEFAULT_QUEUE if config.max_queued_requests is None else config.max_queued_requests
        ),
        chunked_prefill_size=sizes.prefill_token_budget,
        max_prefill_tokens=sizes.max_prefill_tokens,
        dllm_algorithm=",".join(algorithms),
        dllm_algorithm_config=options,
    )
