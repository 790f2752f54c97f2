"""How much memory images take, and how many rows of a size so can share a launch.

Slots and entries are exact. What a program needs beside them is what XLA reports of the compiled
program; for sizes that have not been compiled it is estimated from those that have: it grows with
the pixels of all rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from jdllm import errors
from jdllm.device import sharding
from jdllm.models.images import split
from jdllm.options.config import Quantization
from jdllm.pipelines import interface, registry
from jdllm.pipelines.folder import ModelFolder, PipelineFolder
from jdllm.runner.image import kind, programs, state
from jdllm.scheduler.batch import Bucket
from jdllm.scheduler.rows.image import buckets as image_buckets
from jdllm.scheduler.rows.image.buckets import DecodeBucket, ImageBuckets, StepBucket, Windows

_FLOAT32_BYTES = 4
MOST_ENTRIES = 4096  # captions of tiny models need no more, however many would fit
# The steps of a window of modulation, at most. The weights that make it are read once a window: of
# the 1.5 ms a step that they cost FLUX.1-dev (6.5 GB at 4.3 TB/s) and of the 3.2 ms of Qwen-Image
# (13.6 GB), 0.2 and 0.4 ms are left with 8 steps. All 28 or 50 steps of an image would save no more
# than that, and would take 4 and 6 times the memory: 1.9 and 2.3 GB for windows of 32 images
# (29.6 MB for each of two captions of FLUX, 71 MB for Qwen-Image), 7.6 and 14.2 GB for all steps.
MOST_WINDOW_STEPS = 8
WINDOW_SHARE = 0.25  # of the memory that weights leave free: at most so much is for windows
_MOST_ELEMENTS = 2**31 - 1  # of an array, for indices of 32 bits


def slot_bytes(pipeline: interface.Pipeline, max_pixels: int) -> int:
    """Returns the bytes of a slot: latents and clean latents of at most `max_pixels`."""
    return 2 * _FLOAT32_BYTES * kind.latent_elements(pipeline, max_pixels)


def residual_bytes(pipeline: interface.Pipeline, max_pixels: int) -> int:
    """Returns the bytes of the step cache of a slot: two arrays for each of two passes."""
    elements = kind.residual_elements(pipeline, max_pixels)
    return 2 * state.MOST_PASSES * elements * pipeline.parts.dtype.itemsize


def windows(
    pipeline: interface.Pipeline, rows: tuple[int, ...], num_slots: int, free_bytes: int | None
) -> Windows | None:
    """Returns the windows of modulation, for launches of `rows`; None if steps make all of it.

    Windows divide the default number of steps evenly. In little memory they are shorter; one step
    is the least, whose weights are read as often as without windows.
    """
    ahead = pipeline.modulation
    if ahead is None:
        return None
    steps = pipeline.defaults.num_inference_steps
    steps = math.ceil(steps / math.ceil(steps / MOST_WINDOW_STEPS))
    num_windows = num_slots * programs.passes_of(ahead)
    elements = max(math.prod(leaf.shape) for leaf in jax.tree.leaves(ahead.shapes))
    bounds = [steps, _MOST_ELEMENTS // (num_windows * elements)]
    if free_bytes is not None:
        bounds.append(int(WINDOW_SHARE * free_bytes) // (num_windows * ahead.num_bytes))
    return Windows(steps=max(1, min(bounds)), by_caption=ahead.by_caption, rows=rows)


def window_bytes(pipeline: interface.Pipeline, windows: Windows | None) -> int:
    """Returns the bytes of the modulation of a slot."""
    ahead = pipeline.modulation
    if ahead is None or windows is None:
        return 0
    return programs.passes_of(ahead) * windows.steps * ahead.num_bytes


def check_residuals(num_slots: int, slot_bytes: int, free_bytes: int | None) -> None:
    """Raises a ConfigError if the step cache of all slots takes more than what is free."""
    needed = num_slots * slot_bytes
    if free_bytes is not None and needed > free_bytes:
        raise errors.ConfigError(
            f"enable_step_cache takes {needed / 1e9:.1f} GB for max_running_requests={num_slots} "
            f"images of max_image_pixels, and {max(free_bytes, 0) / 1e9:.1f} GB are left beside "
            "the weights; lower one of them"
        )


def entry_bytes(pipeline: interface.Pipeline, max_tokens: int) -> int:
    """Returns the bytes of an entry for captions of at most `max_tokens`."""
    leaves = jax.tree.leaves(pipeline.caption_shapes(max_tokens))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def check_weights(
    folder: PipelineFolder,
    dtype: str,
    *,
    share: float,
    memory_bytes: int | None,
    offloads_text_encoders: bool,
    quantization: Quantization | None = None,
    tp_size: int = 1,
) -> None:
    """Raises a ConfigError for weights that do not fit into a share of the device's memory.

    It says what would help. `memory_bytes` is None where JAX does not report it: all fits.
    """
    if memory_bytes is None:
        return
    sizes = component_bytes(folder, dtype, tp_size, quantization)
    away = registry.PIPELINES[folder.class_name].layout.text_encoders
    without = sum(size for name, size in sizes.items() if name not in away)
    needed, limit = without if offloads_text_encoders else sum(sizes.values()), share * memory_bytes
    if needed <= limit:
        return
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in sizes.items())
    if tp_size > 1:
        advice = f"it needs devices of {needed / share / 1e9:.1f} GB"
    elif needed > without <= limit:
        advice = f"with --text-encoder-cpu-offload only {without / 1e9:.1f} GB stay there"
    else:
        advice = f"it needs a device of {without / share / 1e9:.1f} GB"
        if not offloads_text_encoders:
            advice += ", and there --text-encoder-cpu-offload"
    if quantization is None:
        saved = sum(sizes.values()) - _bytes_over(folder, dtype, tp_size, "fp8")
        # No text encoder is quantised.
        if needed - saved <= limit:
            advice += f"; or use --quantization fp8 ({(needed - saved) / 1e9:.1f} GB)"
        elif tp_size == 1 and without - saved <= limit:
            left = f"{(without - saved) / 1e9:.1f} GB"
            advice += f"; or use --quantization fp8 and --text-encoder-cpu-offload ({left})"
    fits = [
        f"{size} ({of_size / 1e9:.1f} GB each)"
        for size in sharding.SIZES
        if size > tp_size and (of_size := _bytes_over(folder, dtype, size, quantization)) <= limit
    ]
    if fits:
        advice += f"; or use --tp-size {', '.join(fits)}"
    raise errors.ConfigError(
        f"the weights of {folder.path} take {needed / 1e9:.1f} GB on the device in {dtype}"
        f"{f' and {quantization}' if quantization else ''} "
        f"({parts}), but mem_fraction_static={share:g} leaves {limit / 1e9:.1f} GB of its "
        f"{memory_bytes / 1e9:.1f}: {advice}"
    )


def component_bytes(
    folder: PipelineFolder,
    dtype: str,
    tp_size: int = 1,
    quantization: Quantization | None = None,
) -> dict[str, int]:
    """Returns the bytes of the weights of each component that each of `tp_size` devices holds."""

    def shapes(model: ModelFolder) -> Iterable[jax.ShapeDtypeStruct]:
        abstract = model.abstract(jnp.dtype(dtype), quantization=quantization, tp_size=tp_size)
        return abstract[1].values()

    return {
        name: sum(math.prod(array.shape) * array.dtype.itemsize for array in shapes(model))
        for name, model in folder.models.items()
    }


def _bytes_over(
    folder: PipelineFolder,
    dtype: str,
    tp_size: int,
    quantization: Quantization | None,
) -> float:
    """Returns the bytes of a device's weights, infinite if the model cannot be split so."""
    try:
        check_split(folder, tp_size)
    except errors.ConfigError:
        return math.inf
    return sum(component_bytes(folder, dtype, tp_size, quantization).values())


def check_split(folder: PipelineFolder, tp_size: int) -> None:
    """Raises a ConfigError if so many devices cannot share the pipeline, with sizes that can."""
    for model in folder.models.values():
        split.check(model.config, tp_size)


def entries_that_fit(pipeline: interface.Pipeline, max_tokens: int, cache_bytes: int) -> int:
    """Returns how many captions a store of so many bytes holds; two, if it is too small for them.

    A guided request needs two.
    """
    fitting = cache_bytes // entry_bytes(pipeline, max_tokens)
    return max(2, min(fitting, MOST_ENTRIES))


def fitted(
    buckets: ImageBuckets,
    bytes_by_bucket: Mapping[Bucket, int],
    free_bytes: int,
) -> ImageBuckets:
    """Returns the buckets without launches that need more than `free_bytes`; one row is left.

    `bytes_by_bucket` has what compiled programs need beside weights and memory.
    """
    steps: list[tuple[int, int]] = []  # (pixels of all rows, bytes)
    decodes: list[tuple[int, int]] = []
    for bucket, needed in bytes_by_bucket.items():
        match bucket:
            case StepBucket(rows=rows, height=height, width=width):
                steps.append((rows * (1 + bucket.is_guided) * height * width, needed))
            case DecodeBucket(rows=rows, height=height, width=width, output="image"):
                decodes.append((rows * height * width, needed))
    return dataclasses.replace(
        buckets,
        most_rows=_at_most(buckets.most_rows, most_pixels(steps, free_bytes)),
        most_decode_rows=_at_most(buckets.most_decode_rows, most_pixels(decodes, free_bytes)),
    )


def most_pixels(measured: list[tuple[int, int]], free_bytes: int) -> int | None:
    """Returns how many pixels a launch may have, from (pixels, bytes) of others; None: unknown.

    Small launches have costs that do not grow, so those count that are at least half as large as
    the largest.
    """
    if not measured:
        return None
    largest = max(pixels for pixels, _ in measured)
    rates = [max(1, needed) / pixels for pixels, needed in measured if 2 * pixels >= largest]
    return int(free_bytes / max(rates))


def _at_most(rows: Callable[[int, int], int], pixels: int | None) -> Callable[[int, int], int]:
    if pixels is None:
        return rows
    fitting = image_buckets.rows_by_pixels(pixels)
    return lambda height, width: min(rows(height, width), fitting(height, width))
