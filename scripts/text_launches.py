"""The launch of a model that writes text, without weights; for `count_kernels.py`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from typing import Any

import compiled_launches
import jax
import jax.numpy as jnp

from jdllm.algorithms import lookup as algorithms
from jdllm.engine.start import kinds
from jdllm.kv_cache.pool import PoolConfig
from jdllm.models import loading, registry
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import interrupts
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.rows import interface

PAGE = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Which launch it is: the largest of prefill or of decode, of rows with or without logits."""

    rows: int
    context_length: int
    algorithms: tuple[str, ...] | None  # None: the first of the model's kind
    with_logits: bool
    is_prefill: bool


def launch(directory: pathlib.Path, shape: Shape, *, layers: int) -> compiled_launches.Launch:
    """Returns a model's largest launch of this shape, with so many layers."""
    parsed, graphdef, params = _model(directory, layers)
    spec, R, length = parsed.spec, shape.rows, shape.context_length
    kind = kinds.kind_of(spec)
    assert spec.diffusion.kind is not None, "kind_of refuses a family without rows"
    first = next(iter(algorithms.of_kind(spec.diffusion.kind)))
    pool = PoolConfig(
        num_pages=-(-length // PAGE) * R,
        page_size=PAGE,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype="bfloat16",
        kv_heads_of_layers=spec.kv_heads_of_layers,
    )
    config = StepConfig(
        spec=spec,
        pool=pool,
        context_length=length,
        num_slots=R,
        algorithms=shape.algorithms or (first,),
        max_launch_steps=4,
    )
    built = kind.device(graphdef, config, compiled_launches.GPU)
    rows = kind.rows.build(
        interface.RowConfig(
            max_running_requests=R,
            context_length=length,
            block_size=spec.diffusion.block_size,
            page_size=PAGE,
            num_pages=pool.num_pages,
            prefill_token_budget=R * length,
            max_prefill_tokens=R * length,
        )
    )
    wanted = [
        bucket
        for bucket in rows.buckets()
        if bucket.denoises != shape.is_prefill and bucket.with_logits == shape.with_logits
    ]
    if not wanted:
        raise SystemExit(f"{directory}: this model has no such launch")
    largest = max(wanted, key=lambda bucket: (bucket.rows, bucket.tokens))
    program, batch = built.program(largest), ScheduleBatch(rows=(), bucket=largest)
    memory = jax.eval_shape(built.create_memory)
    memory = {name: memory[name] for name in program.uses}
    return compiled_launches.Launch(
        name=largest.name,
        step=program.step,
        arguments=(params, memory, program.inputs(batch, interrupts.shapes())),
    )


def _model(directory: pathlib.Path, layers: int) -> tuple[Any, Any, Any]:
    """Returns the parsed config of a model of so many layers, its graph, its weights' shapes."""
    config = json.loads((directory / "config.json").read_text())
    for one in (config, config.get("text_config", {})):
        names = {"num_hidden_layers", "n_layers"} & one.keys()  # a family has one of them
        one |= dict.fromkeys(names, layers)
        if "layer_types" in one:  # the last ones: DiffusionGemma ends with a layer of each type
            one["layer_types"] = one["layer_types"][-layers:]
    with tempfile.TemporaryDirectory() as temporary:
        (pathlib.Path(temporary) / "config.json").write_text(json.dumps(config))
        parsed = loading.read_config(temporary)
    graphdef, params = registry.family(parsed.spec.architecture).abstract(
        parsed, dtype=jnp.bfloat16, hash_embedding_positions=True
    )
    bfloat16 = jnp.dtype(jnp.bfloat16)
    params = jax.eval_shape(lambda params: loading.serving_params(params, bfloat16), params)
    return parsed, graphdef, params
