"""Builds a running core for images from a pipeline folder: loads, chooses sizes, compiles.

The counterpart of `build.py` for pipelines. The programs of the sizes that are named at start are
compiled at start; those of other sizes, and of guided steps if guidance is not the default of the
pipeline, at their first use. Those of guided steps of a pipeline that is made for negative prompts
(Qwen-Image) follow the start.

On an accelerator a program takes half a minute to compile. The programs for one image serve every
request, if not at the highest throughput (H200, Z-Image at 512 x 512: 43 denoised rows a second
alone, 47 by twelve). So the start compiles these, and the others follow while requests run.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Callable

from jdllm import errors
from jdllm.device import devices, facts, sharding
from jdllm.engine.core import EngineCore
from jdllm.engine.start import build as text_build
from jdllm.engine.start import sizing, startup
from jdllm.engine.start.images import first_use, start_programs
from jdllm.options import batching_rules, image_params
from jdllm.options.config import Quantization
from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines import interface, loaded
from jdllm.pipelines.folder import PipelineFolder
from jdllm.runner import model_runner
from jdllm.runner.image import sizes as image_sizes
from jdllm.runner.image.kind import ImageKind, ImageKindConfig
from jdllm.runner.launch import compile_counter, executables
from jdllm.scheduler.rows.image import buckets as image_buckets
from jdllm.scheduler.rows.image import limits as image_limits
from jdllm.scheduler.rows.image.buckets import ImageBuckets
from jdllm.scheduler.rows.image.limits import ImageLimits
from jdllm.scheduler.rows.image.rows import ImageRowConfig, ImageRows
from jdllm.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# A CPU gets few programs: compiling is most of the start. It serves small models, of which a launch
# costs about as much as a row.
CPU_ROWS, ACCELERATOR_ROWS = (1, 2, 4), (1, 2, 4, 8, 12)
CPU_LAUNCH_COST = 1.0
# Of the cores: lowering holds Python's interpreter lock, which the engine's thread needs, too.
BACKGROUND_SHARE = 0.25
CPU_TOKENS, ACCELERATOR_TOKENS = (64, 512), (64, 128, 256, 512)
CPU_CAPTION_BYTES, ACCELERATOR_CAPTION_BYTES = 64 << 20, 1 << 30
DEFAULT_QUEUE = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageBuildConfig:
    """What may be chosen; None is what suits the pipeline and the device.

    `sizes` are the (height, width) in pixels that are compiled at start. A launch has at most
    `batching_max_size` requests, or fewer where the rules say so; `model_path` is the model's name
    in rules. When nothing runs, the first step may wait `batching_delay_ms` for others.
    `mem_fraction_static` is the share of device memory for weights, latents, captions and what a
    launch needs; the rest is a margin. `caption_cache_bytes` bounds the captions that stay on the
    device. `has_step_cache`: requests may have a step cache, whose memory and programs exist only
    then. `offloads_text_encoders`: their weights wait in the host's memory. `compiles_behind`:
    programs for several images are compiled after the start. The transformer is split over
    `tp_size` devices; all bytes are those of each.
    """

    directory: pathlib.Path
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: Quantization | None = None
    variant: str | None = None
    tp_size: int = 1
    random_seed: int = 0
    mem_fraction_static: float = 0.85
    max_running_requests: int | None = None
    max_queued_requests: int = DEFAULT_QUEUE
    batching_max_size: int | None = None
    batching_delay_ms: float = 0.0
    logs_batching: bool = False
    batching_rules: tuple[batching_rules.BatchingRule, ...] = ()
    model_path: str = ""
    sizes: tuple[tuple[int, int], ...] | None = None
    max_pixels: int = image_limits.DEFAULT_MAX_PIXELS
    caption_cache_bytes: int | None = None
    has_step_cache: bool = False
    offloads_text_encoders: bool = False
    disable_overlap_schedule: bool = False
    decode_log_interval: int = 40
    show_progress: bool = True
    compiles_behind: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "batching_max_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.ConfigError(f"{name}={value} must be at least 1")
        if not self.batching_delay_ms >= 0:
            raise errors.ConfigError(f"batching_delay_ms={self.batching_delay_ms} must be >= 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImages:
    """Everything an engine for images holds; `first_use` is closed when the engine ends."""

    config: ImageBuildConfig
    device: facts.DeviceFacts
    folder: PipelineFolder
    pipeline: interface.Pipeline
    core: EngineCore
    runner: model_runner.ModelRunner
    rows: ImageRows
    buckets: ImageBuckets
    limits: ImageLimits
    default_size: tuple[int, int]  # (height, width) in pixels
    num_slots: int
    dtype: str  # of the weights
    first_use: first_use.FirstUse
    weight_bytes: int  # on the device
    host_weight_bytes: int
    slot_bytes: int  # of all slots
    residual_bytes: int  # of the step cache of all slots
    window_bytes: int  # of the modulation of all slots
    caption_bytes: int  # of all entries
    startup_s: float
    compiles_at_ready: int

    def release(self) -> None:
        """Begins no compilation and frees the device's memory; the engine thread has ended."""
        self.first_use.close()
        self.runner.release()


def build(config: ImageBuildConfig, progress: startup.StartupProgress) -> BuiltImages:
    """Loads a pipeline, chooses the memory of its rows and compiles the default programs.

    Raises a ConfigError for a folder with faults and for sizes that the pipeline cannot make.
    """
    began_s = time.monotonic()
    text_build.enable_compilation_cache()
    progress.enter("load")
    folder = pipeline_folder.read(
        config.directory, load_format=config.load_format, variant=config.variant
    )
    # What can be refused without the weights is refused before they are read.
    image_sizes.check_split(folder, config.tp_size)
    if config.tp_size > 1:
        devices.prepare_several()
    mesh = sharding.make_mesh(config.tp_size, devices.every())
    device = devices.facts(config.tp_size)
    dtype = loaded.resolve_dtype(config.dtype, device)
    limits = _limits(config, loaded.without_modules(folder, dtype))
    image_sizes.check_weights(
        folder,
        dtype,
        share=config.mem_fraction_static,
        memory_bytes=device.memory_bytes,
        offloads_text_encoders=config.offloads_text_encoders,
        quantization=config.quantization,
        tp_size=config.tp_size,
    )
    model = loaded.load(
        folder,
        dtype,
        device,
        offloads_text_encoders=config.offloads_text_encoders,
        quantization=config.quantization,
        seed=config.random_seed,
        show_progress=config.show_progress,
        mesh=mesh,
    )
    pipeline = model.pipeline
    default_size = _default_size(folder, pipeline, limits)
    buckets = _buckets(config, pipeline, limits, device, default_size)
    num_slots = config.max_running_requests or _default_rows(device)
    max_tokens = buckets.tokens[-1]
    num_entries = image_sizes.entries_that_fit(pipeline, max_tokens, _caption_bytes(config, device))
    free_bytes = sizing.free_bytes(config.mem_fraction_static, config.tp_size)
    residual_bytes = 0
    if config.has_step_cache:
        slot_bytes = image_sizes.residual_bytes(pipeline, config.max_pixels)
        image_sizes.check_residuals(num_slots, slot_bytes, free_bytes)
        residual_bytes = num_slots * slot_bytes
    left_bytes = None if free_bytes is None else free_bytes - residual_bytes
    modulate_rows = (1,) if device.is_cpu else buckets.rows
    windows = image_sizes.windows(pipeline, modulate_rows, num_slots, left_bytes)
    buckets = dataclasses.replace(buckets, windows=windows)
    kind = ImageKind(
        pipeline,
        ImageKindConfig(
            num_slots=num_slots,
            num_entries=num_entries,
            max_pixels=config.max_pixels,
            max_tokens=max_tokens,
            has_step_cache=config.has_step_cache,
            window_steps=windows.steps if windows else 1,
        ),
    )
    runner = model_runner.ModelRunner(model.params, kind, device=device)
    at_start = start_programs.at_start(buckets, pipeline)
    if _compiles_behind(config, device):
        at_start = [bucket for bucket in at_start if bucket.rows == 1]
    progress.enter("compile", total=len(at_start))
    runner.compile(at_start, progress.advance)
    free_bytes = sizing.free_bytes(config.mem_fraction_static, config.tp_size)
    if free_bytes is not None:
        buckets = image_sizes.fitted(buckets, runner.bytes_by_bucket, free_bytes)
    rows = ImageRows(
        ImageRowConfig(
            max_running_requests=num_slots,
            buckets=buckets,
            limits_of_images=limits,
            num_entries=num_entries,
            start_delay_s=config.batching_delay_ms / 1000,
            logs_batching=config.logs_batching,
            device=device,
        )
    )
    programs = first_use.FirstUse(
        runner,
        free_bytes=free_bytes,
        num_threads=max(1, int(BACKGROUND_SHARE * executables.compile_threads())),
    )
    later = start_programs.at_start(buckets, pipeline)  # of those that fit
    if _compiles_behind(config, device):
        later += start_programs.after_start(buckets, pipeline)
    programs.compile_later([one for one in later if not runner.has_program(one)])
    rows.programs.is_ready = programs.is_ready
    return BuiltImages(
        config=config,
        device=device,
        folder=folder,
        pipeline=pipeline,
        core=EngineCore(
            Scheduler(rows, max_queued_requests=config.max_queued_requests),
            runner,
            max_total_tokens=None,
            overlaps=not config.disable_overlap_schedule,
            decode_log_interval=config.decode_log_interval,
        ),
        runner=runner,
        rows=rows,
        buckets=buckets,
        limits=limits,
        default_size=default_size,
        num_slots=num_slots,
        dtype=str(next(iter(model.params.values())).dtype),
        first_use=programs,
        weight_bytes=model.weight_bytes(on_host=False),
        host_weight_bytes=model.weight_bytes(on_host=True),
        residual_bytes=residual_bytes,
        window_bytes=num_slots * image_sizes.window_bytes(pipeline, windows),
        slot_bytes=num_slots * image_sizes.slot_bytes(pipeline, config.max_pixels),
        caption_bytes=num_entries * image_sizes.entry_bytes(pipeline, max_tokens),
        startup_s=time.monotonic() - began_s,
        compiles_at_ready=compile_counter.COUNTER.count,
    )


def _limits(config: ImageBuildConfig, pipeline: interface.Pipeline) -> ImageLimits:
    """Returns the bounds of images; raises a ConfigError if the schedule does not allow them."""
    least = pipeline.size_multiple**2
    if config.max_pixels < least:
        raise errors.ConfigError(
            f"max_image_pixels={config.max_pixels} must be at least {least}: sides are multiples "
            f"of {pipeline.size_multiple} pixels"
        )
    limits = ImageLimits(
        size_multiple=pipeline.size_multiple,
        latent_shape=pipeline.latent_shape,
        max_pixels=config.max_pixels,
        max_side=pipeline.max_side,
    )
    most_pixels = min(limits.max_pixels, limits.max_side**2)
    pipeline.parts.schedule.check_images(most_pixels // least)
    return limits


def _buckets(
    config: ImageBuildConfig,
    pipeline: interface.Pipeline,
    limits: ImageLimits,
    device: facts.DeviceFacts,
    default_size: tuple[int, int],
) -> ImageBuckets:
    """Returns the compiled sizes, before it is known what fits into memory."""
    sizes = config.sizes or (default_size,)
    for size in sizes:
        _check_size(*size, limits)
    rows = _rows(config, device)
    buckets = ImageBuckets(
        rows=rows,
        tokens=_caption_lengths(pipeline, device),
        sizes=sizes,
        cached=(False, True) if config.has_step_cache else (False,),
        most_requests=_most_requests(config, pipeline, device),
        image_tokens=pipeline.image_tokens,
    )
    if device.is_cpu:
        return dataclasses.replace(
            buckets, encode_rows=(1,), decode_rows=(1,), launch_cost=CPU_LAUNCH_COST
        )
    # The option bounds every launch: 1 switches batching off.
    return dataclasses.replace(
        buckets,
        encode_rows=image_buckets.up_to(buckets.encode_rows, rows[-1]),
        decode_rows=image_buckets.up_to(buckets.decode_rows, rows[-1]),
    )


def _caption_lengths(pipeline: interface.Pipeline, device: facts.DeviceFacts) -> tuple[int, ...]:
    """Returns the compiled lengths of captions."""
    most = min(pipeline.defaults.longest_sequence_length, pipeline.max_caption_tokens)
    most = -(-most // pipeline.caption_multiple) * pipeline.caption_multiple
    tokens = CPU_TOKENS if device.is_cpu else ACCELERATOR_TOKENS
    tokens = (*(one for one in tokens if one < most), most)
    return tuple(pipeline.prefix_tokens + one for one in tokens)


def _rows(config: ImageBuildConfig, device: facts.DeviceFacts) -> tuple[int, ...]:
    """Returns how many requests a step may have; no program is for more than may run."""
    rows = CPU_ROWS if device.is_cpu else ACCELERATOR_ROWS
    most = config.batching_max_size or rows[-1]
    if config.max_running_requests is not None:
        most = min(most, config.max_running_requests)
    return (*(one for one in rows if one < most), most)


def _most_requests(
    config: ImageBuildConfig, pipeline: interface.Pipeline, device: facts.DeviceFacts
) -> Callable[[int, int], int | None]:
    """Returns the bound of the batching rules for images (height, width)."""
    memory = device.memory_bytes

    def most(height: int, width: int) -> int | None:
        return batching_rules.most_images(
            config.batching_rules,
            model=config.model_path,
            width=width,
            height=height,
            tokens=pipeline.image_tokens(height, width),
            memory_gb=None if memory is None else memory / (1 << 30),
        )

    return most


def _default_size(
    folder: PipelineFolder,
    pipeline: interface.Pipeline,
    limits: ImageLimits,
) -> tuple[int, int]:
    """Returns the (height, width) of images for which a request says nothing.

    It is the pipeline's, or smaller: the size that its autoencoder was made for (`sample_size` in
    its config.json, 1024 in published pipelines), and the limits of this server.
    """
    defaults, multiple = pipeline.defaults, pipeline.size_multiple
    height, width = defaults.height, defaults.width
    made_for = folder.models["vae"].hf_config.get("sample_size")
    most = limits.max_side
    if isinstance(made_for, int) and multiple <= made_for < most:
        most = made_for
    if max(height, width) > most or height * width > limits.max_pixels:
        side = min(most, height, width, math.isqrt(limits.max_pixels))
        height = width = max(side // multiple, 1) * multiple
    return height, width


def _check_size(height: int, width: int, limits: ImageLimits) -> None:
    one = image_params.ImageParams(height=height, width=width, num_inference_steps=1)
    try:
        limits.check(one)
    except errors.RequestError as error:
        raise errors.ConfigError(f"warmup_resolutions: {error}") from error


def _compiles_behind(config: ImageBuildConfig, device: facts.DeviceFacts) -> bool:
    """Returns whether the start leaves programs for several images to the time after it.

    A CPU compiles its few small programs at once: it has no cores to spare while it computes.
    """
    return not device.is_cpu if config.compiles_behind is None else config.compiles_behind


def _default_rows(device: facts.DeviceFacts) -> int:
    defaults = ImageRows.defaults
    return defaults.cpu_rows if device.is_cpu else defaults.accelerator_rows


def _caption_bytes(config: ImageBuildConfig, device: facts.DeviceFacts) -> int:
    if config.caption_cache_bytes is not None:
        return config.caption_cache_bytes
    return CPU_CAPTION_BYTES if device.is_cpu else ACCELERATOR_CAPTION_BYTES
