"""Measures the engine in this process: takes batches of prompts, returns records."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdllm import version
from jdllm.bench import command_line, stats
from jdllm.engine import requests
from jdllm.engine.engine import Engine
from jdllm.host import progress
from jdllm.options import config, sampling_params
from jdllm.runner import expert_use

# Options that identify what was measured.
REPORTED_OPTIONS = (
    "model_path",
    "load_format",
    "tp_size",
    "ep_size",
    "dtype",
    "page_size",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "num_continuous_decode_steps",
    "disable_fused_commit",
    "disable_overlap_schedule",
    "schedule_policy",
    "disable_radix_cache",
    "mem_fraction_static",
    "dllm_algorithm",
)


def open_engine(engine_config: config.EngineConfig) -> Engine:
    """Returns a running engine that logs to stderr at the configured level."""
    # `force`: libraries imported above leave handlers of their own on the root logger.
    logging.basicConfig(level=engine_config.log_level.upper(), force=True)
    return Engine(engine_config)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[sampling_params.SamplingParams],
    *,
    show_progress: bool = False,
) -> tuple[list[stats.Record], float]:
    """Submits all prompts at once; returns their records, and the seconds until all had ended.

    The times of commits are the engine's own, so a slow reader of its events does not change
    them.
    """
    commits: list[list[stats.Commit]] = [[] for _ in prompts]
    records: dict[int, stats.Record] = {}
    began = time.perf_counter()
    bar = progress.bar(total=len(prompts), is_shown=show_progress, unit="req")
    try:
        with bar:
            for generation in engine.iterate(prompts, params):
                meta, index = generation.meta_info, generation.prompt_index
                at_s = began + meta["e2e_latency"]
                counts = {"nfe": meta["nfe"], "blocks": meta["dllm"]["blocks"]}
                tokens = meta["completion_tokens"]
                if tokens > (commits[index][-1].tokens if commits[index] else 0):
                    commits[index].append(stats.Commit(at_s=at_s, tokens=tokens, **counts))
                finish = generation.finish_reason
                if finish is None:
                    continue
                records[index] = stats.Record(
                    start_s=began,
                    end_s=at_s,
                    prompt_tokens=meta["prompt_tokens"],
                    completion_tokens=tokens,
                    commits=tuple(commits[index]),
                    cached_tokens=meta["cached_tokens"],
                    text=generation.text,
                    error=finish["message"] if finish["type"] == "abort" else None,
                    **counts,
                )
                bar.update()
    except requests.EngineFault as error:
        raise command_line.BenchError(f"a launch failed on the device: {error}") from error
    duration_s = time.perf_counter() - began
    return [records[index] for index in range(len(prompts))], duration_s


def random_ids(
    rng: np.random.Generator, engine: Engine, count: int, length: int
) -> list[list[int]]:
    """Returns `count` prompts of `length` random token ids."""
    return rng.integers(0, engine.spec.vocab_size, (count, length)).tolist()


def surroundings(engine: Engine) -> dict[str, Any]:
    """Returns what must be quoted with every figure: command, device, versions, options."""
    info = engine.server_info()
    return {
        "command": command_line.shown(sys.argv),
        "device": str(engine.device),
        "versions": {
            "jdllm": version.__version__,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
        "kernels": info["kernels"],
        "engine": {
            **{name: info[name] for name in REPORTED_OPTIONS if name in info},
            "context_length": engine.context_length,
            "max_running_requests": engine.max_running_requests,
            "max_total_tokens": engine.max_total_tokens,
            "has_draft_adapter": engine.model.config.has_draft_adapter,
            "block_size": engine.spec.diffusion.block_size,
        },
    }


def headline(found: dict[str, Any]) -> str:
    """Returns `surroundings` as comment lines."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    options = ", ".join(f"{name}={value}" for name, value in found["engine"].items())
    return f"# {found['command']}\n# {found['device']}; {versions}\n# {options}"


def distinct_experts(engine: Engine, rng: np.random.Generator) -> list[int]:
    """Returns how many experts one block of random ids reaches in each MoE layer, [] if dense."""
    ids = rng.integers(0, engine.spec.vocab_size, engine.spec.diffusion.block_size)
    return expert_use.distinct_experts(engine.model, ids.astype(np.int32))
