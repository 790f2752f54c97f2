"""Chooses shapes and memory at start: rows, tokens, pages, bytes.

Shapes follow from the options and the model's config alone, so a wrong option is refused before
any weight is read. The number of pages depends on the memory that the weights leave free.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jdllm import errors
from jdllm.device import devices, facts
from jdllm.kv_cache import pool
from jdllm.options.config import EngineConfig
from jdllm.scheduler.rows import interface
from jdllm.spec import ModelSpec

# Tokens of the default buckets. A CPU gets few: a launch is compute bound there with few tokens
# already, and compile time is most of the start.
CPU_PREFILL_TOKENS, ACCELERATOR_PREFILL_TOKENS = 512, 8192
# How many prefill launches in a row may delay the rows in decode. Prefill comes first because
# waiting prompts leave rows of the decode bucket empty.
PREFILL_LAUNCHES_IN_A_ROW = 4
# Tokens of KV that each row should have on average. Buckets with more rows than that are not
# compiled: fewer rows preempt one another less.
TOKENS_PER_ROW = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Tokens and rows of the compiled steps.

    `prefill_token_budget` bounds one launch, `max_prefill_tokens` bounds all prefill launches
    between two decode launches.
    """

    context_length: int
    max_running_requests: int
    page_size: int
    prefill_token_budget: int
    max_prefill_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Shapes):
    """The shapes, and the memory that they and the weights occupy: tokens, rows, pages, bytes."""

    num_pages: int
    weight_bytes: int
    kv_bytes: int
    step_bytes: int = 0  # of the step that needs most memory; known once all are compiled


def choose_shapes(
    config: EngineConfig,
    spec: ModelSpec,
    defaults: interface.RowDefaults,
    device: facts.DeviceFacts,
) -> Shapes:
    """Returns the shapes; raises a ConfigError for an option that does not fit the model.

    `defaults` are the defaults of the model's kind of rows.
    """
    longest = spec.max_position_embeddings
    context_length = config.context_length or min(longest, defaults.most_context or longest)
    if context_length > spec.max_position_embeddings:
        raise errors.ConfigError(
            f"{context_length=} exceeds the model's max_position_embeddings="
            f"{spec.max_position_embeddings}"
        )
    for option in defaults.unused_options:
        if getattr(config, option):
            raise errors.ConfigError(
                f"{option} has no meaning for {spec.architecture}, {defaults.why_unused}; "
                "leave it out"
            )
    block_size = spec.diffusion.block_size
    budget = config.chunked_prefill_size or (
        CPU_PREFILL_TOKENS if device.is_cpu else ACCELERATOR_PREFILL_TOKENS
    )
    if budget < block_size:
        raise errors.ConfigError(
            f"chunked_prefill_size={budget} is less than one block of {block_size} tokens"
        )
    rows = defaults.cpu_rows if device.is_cpu else defaults.accelerator_rows
    page_size = pool.choose_page_size(block_size, config.page_size)
    if config.max_total_tokens is not None:
        pool.pages_of_total(config.max_total_tokens, page_size)
    return Shapes(
        context_length=context_length,
        max_running_requests=config.max_running_requests or rows,
        page_size=page_size,
        prefill_token_budget=budget,
        max_prefill_tokens=config.max_prefill_tokens or PREFILL_LAUNCHES_IN_A_ROW * budget,
    )


def choose_sizes(
    config: EngineConfig,
    spec: ModelSpec,
    shapes: Shapes,
    params: dict[str, jax.Array],
    kv_dtype: str,
    device: facts.DeviceFacts,
) -> Sizes:
    """Returns the shapes and the size of the pool that fits beside the loaded weights.

    All bytes are those of one device; `spec` has the heads of one device.
    """
    num_pages = pool.choose_num_pages(
        spec,
        page_size=shapes.page_size,
        dtype=kv_dtype,
        context_length=shapes.context_length,
        max_running_requests=shapes.max_running_requests,
        max_total_tokens=config.max_total_tokens,
        free_bytes=None
        if device.is_cpu
        else free_bytes(config.mem_fraction_static, device.num_devices),
    )
    if config.max_running_requests is None:
        rows = rows_that_fit(
            num_pages * shapes.page_size, shapes.context_length, shapes.max_running_requests
        )
        shapes = dataclasses.replace(shapes, max_running_requests=rows)
    per_token = spec.kv_bytes_per_token(jnp.dtype(kv_dtype).itemsize)
    return Sizes(
        **dataclasses.asdict(shapes),
        num_pages=num_pages,
        weight_bytes=sum(array.addressable_shards[0].data.nbytes for array in params.values()),
        kv_bytes=per_token * num_pages * shapes.page_size,
    )


def check_memory(sizes: Sizes, memory: tuple[int, int] | None) -> None:
    """Raises a ConfigError unless the largest step fits beside what the device already holds.

    `memory` is what `device.memory_use` returned with weights, pool and row states in place.
    """
    if memory is None:
        return
    in_use, limit = memory
    if in_use + sizes.step_bytes <= limit:
        return
    short = in_use + sizes.step_bytes - limit
    advice = "a smaller --chunked-prefill-size or fewer --max-running-requests"
    if short < sizes.kv_bytes:
        # The static share covers weights and KV, and nothing else that the device holds.
        others = in_use - sizes.weight_bytes - sizes.kv_bytes
        fraction = math.floor((limit - sizes.step_bytes - others) / limit * 100) / 100
        pages = (sizes.kv_bytes - short) * sizes.num_pages // sizes.kv_bytes
        advice = (
            f"--mem-fraction-static {fraction:.2f} or less, --max-total-tokens "
            f"{pages * sizes.page_size} or fewer, {advice}"
        )
    raise errors.ConfigError(
        f"a launch needs {sizes.step_bytes / 1e9:.2f} GB beside {in_use / 1e9:.2f} GB for weights "
        f"({sizes.weight_bytes / 1e9:.2f}), KV ({sizes.kv_bytes / 1e9:.2f}) and row states; the "
        f"device gives {limit / 1e9:.2f} GB: use {advice}"
    )


def rows_that_fit(pool_tokens: int, context_length: int, most: int) -> int:
    """Returns the largest power of two up to `most` with enough of the pool for each row."""
    wanted = max(1, min(most, pool_tokens // min(context_length, TOKENS_PER_ROW)))
    return 1 << (wanted.bit_length() - 1)


def free_bytes(mem_fraction_static: float, num_devices: int = 1) -> int | None:
    """Returns the bytes of the accelerator's memory that the share leaves beside what is in use.

    They may be negative; None if JAX does not report the memory. Of several accelerators, the one
    with the least free memory decides.
    """
    memory = devices.memory_use(num_devices)
    if memory is None:
        return None
    in_use, limit = memory
    return int(limit * mem_fraction_static) - in_use
