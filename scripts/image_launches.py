"""The launches of an image pipeline without weights; for `count_kernels.py`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import compiled_launches
import jax
import jax.numpy as jnp

from jdllm.pipelines import folder, interface, loaded
from jdllm.runner.image import sizes
from jdllm.runner.image.kind import ImageKind, ImageKindConfig
from jdllm.runner.launch import interrupts
from jdllm.scheduler.batch import Bucket, ScheduleBatch
from jdllm.scheduler.rows.image import buckets

_DTYPE = jnp.dtype(jnp.bfloat16)
# What the config.json of a component calls the number of its layers.
_LAYERS = {
    "num_hidden_layers", "n_layers", "n_refiner_layers", "num_layers", "num_single_layers"
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of launches: requests, pixels of a side, and tokens of captions unless padded.

    With `is_offloaded` the weights of text encoders are in the host's memory.
    """

    rows: int
    side: int
    caption_tokens: int
    is_guided: bool
    is_cached: bool
    is_offloaded: bool


def launches(
    directory: pathlib.Path, shape: Shape, *, layers: int
) -> Iterator[compiled_launches.Launch]:
    """Yields the launches of a pipeline of this shape, each component with at most `layers`."""
    pipeline, params = loaded.without_weights(_with_layers(directory, layers), _DTYPE)
    tokens = shape.caption_tokens
    if pipeline.pads_captions:
        tokens = pipeline.defaults.max_sequence_length
    tokens += pipeline.prefix_tokens
    windows = sizes.windows(pipeline, (shape.rows,), shape.rows, free_bytes=None)
    kind = ImageKind(
        pipeline,
        ImageKindConfig(
            num_slots=shape.rows,
            num_entries=2 * shape.rows,
            max_pixels=shape.side**2,
            max_tokens=tokens,
            has_step_cache=shape.is_cached,
            window_steps=1 if windows is None else windows.steps,
        ),
    )
    memory = jax.eval_shape(kind.create_memory)
    away = tuple(map(interface.prefix_of, pipeline.layout.text_encoders))
    on_host = {name for name in params if shape.is_offloaded and name.startswith(away)}
    for bucket in _buckets(shape, tokens, windows):
        program = kind.program(bucket)
        inputs = program.inputs(ScheduleBatch(rows=(), bucket=bucket), interrupts.shapes())
        uses = {name: memory[name] for name in program.uses}
        yield compiled_launches.Launch(
            name=bucket.name,
            step=program.step,
            arguments=(params, uses, inputs),
            on_host=frozenset(on_host),
        )


def _buckets(shape: Shape, tokens: int, windows: buckets.Windows | None) -> Iterator[Bucket]:
    rows, side = shape.rows, shape.side
    yield buckets.EncodeBucket(rows=rows, tokens=tokens)
    if windows is not None:
        yield windows.bucket(is_guided=shape.is_guided, rows=rows)
    yield buckets.StepBucket(
        rows=rows,
        tokens=tokens,
        height=side,
        width=side,
        is_guided=shape.is_guided,
        is_cached=shape.is_cached,
    )
    yield buckets.DecodeBucket(rows=rows, height=side, width=side, output="image")


def _with_layers(directory: pathlib.Path, layers: int) -> folder.PipelineFolder:
    """Returns a pipeline whose components have no more than so many layers of a kind."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = pathlib.Path(temporary) / directory.name
        shutil.copytree(
            directory, copy, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.*")
        )
        for file in copy.glob("*/config.json"):
            config = json.loads(file.read_text())
            config |= {name: min(layers, config[name]) for name in _LAYERS & config.keys()}
            file.write_text(json.dumps(config))
        return folder.read(copy, load_format="dummy")
