"""Pipelines of the published sizes (`configs/`): what they compute has shapes, and no weights."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp

from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines import interface, loaded
from jdllm.pipelines.folder import PipelineFolder
from jdllm.runner.image.kind import ImageKind, ImageKindConfig
from jdllm.runner.launch import interrupts
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.rows.image import buckets

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A pipeline, and the shapes of its parameters."""

    folder: PipelineFolder
    pipeline: interface.Pipeline
    params: dict[str, jax.ShapeDtypeStruct]

    @property
    def num_parameters(self) -> dict[str, int]:
        """Returns those of each component."""
        counts = dict.fromkeys(self.folder.models, 0)
        for path, shape in self.params.items():
            counts[path.partition(".")[0]] += math.prod(shape.shape)
        return counts

    def check_launches(self, tokens: int, *, max_tokens: int, side: int = 1024) -> None:
        """Traces a launch of each kind with captions of `tokens`."""
        config = ImageKindConfig(
            num_slots=4,
            num_entries=4,
            max_pixels=2048 * 2048,
            max_tokens=max_tokens,
            window_steps=8,
        )
        kind = ImageKind(self.pipeline, config)
        memory = jax.eval_shape(kind.create_memory)
        size = {"height": side, "width": side}
        ahead = self.pipeline.modulation
        passes = () if ahead is None else (1, 2) if ahead.by_caption else (1,)
        for bucket in (
            buckets.EncodeBucket(rows=2, tokens=tokens),
            *(buckets.ModulateBucket(rows=2, num_passes=one) for one in passes),
            buckets.StepBucket(rows=2, tokens=tokens, is_guided=True, **size),
            buckets.DecodeBucket(rows=2, output="image", **size),
        ):
            program = kind.program(bucket)
            empty = ScheduleBatch(rows=(), bucket=bucket)
            inputs = program.inputs(empty, interrupts.shapes())
            parts = {name: memory[name] for name in program.uses}
            after, outputs = jax.eval_shape(program.step, self.params, parts, inputs)
            assert after == parts
        assert outputs.value.shape == (2, side * side * 3 // 4)


@functools.cache
def read(name: str) -> Published:
    """Returns the pipeline of a folder of `configs/`, in bfloat16."""
    folder = pipeline_folder.read(CONFIGS / name, load_format="dummy")
    pipeline, params = loaded.without_weights(folder, jnp.dtype("bfloat16"))
    return Published(folder=folder, pipeline=pipeline, params=params)
