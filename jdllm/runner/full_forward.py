"""Whole-sequence logits of a checkpoint, without engine, pages or sampling.

For parity checks, scoring and notebooks: `load_model(path).logits(ids)`. It needs memory for
the full `[B, S, V]` float32 result, which serving never builds.
"""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32
from numpy.typing import ArrayLike

from jdllm import spec as spec_lib
from jdllm.checkpoint import source
from jdllm.layers import attention
from jdllm.models import loading


class FullModel:
    """A loaded model whose `logits` sees whole sequences under the family's attention."""

    def __init__(self, model: loading.LoadedModel):
        self.model = model
        # A closure, not a static argument: each call would hash the graph.
        self._forward = jax.jit(functools.partial(_logits, model.graphdef, model.spec))

    @property
    def spec(self) -> spec_lib.ModelSpec:
        """Returns what the engine knows about the model."""
        return self.model.spec

    def logits(self, ids: ArrayLike) -> Float32[Array, "B S V"]:
        """Returns the logits of token ids [B, S], unshifted."""
        return self._forward(self.model.params, self._checked(ids))

    def _checked(self, ids: ArrayLike) -> Int32[np.ndarray, "B S"]:
        array = np.asarray(ids)
        if array.ndim != 2 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"ids must be a non-empty integer array [batch, length], got shape "
                f"{array.shape} of {array.dtype}"
            )
        low, high = array.min(), array.max()
        if low < 0 or high >= self.spec.vocab_size:
            raise ValueError(
                f"ids must lie in [0, {self.spec.vocab_size}), got values from {low} to {high}"
            )
        if array.shape[1] > self.spec.max_position_embeddings:
            raise ValueError(
                f"sequences of {array.shape[1]} tokens exceed the model's "
                f"max_position_embeddings={self.spec.max_position_embeddings}"
            )
        return array.astype(np.int32)


def load_model(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    block_size: int | None = None,
    load_format: str = "auto",
) -> FullModel:
    """Returns the model of a directory or a name (`source.resolve`); None means jdllm-nano."""
    directory = source.resolve(path)
    return FullModel(
        loading.load(directory, dtype=dtype, block_size=block_size, load_format=load_format)
    )


def _logits(
    graphdef: nnx.GraphDef,
    model_spec: spec_lib.ModelSpec,
    params: loading.Params,
    ids: Int[Array, "B S"],
) -> Float[Array, "B S V"]:
    batch, length = ids.shape
    diffusion = model_spec.diffusion
    mask = attention.visibility_mask(length, diffusion.block_size, diffusion.attention_pattern)
    model = loading.merge(graphdef, params)
    hidden, _ = model(
        ids.reshape(-1),
        jnp.tile(jnp.arange(length, dtype=jnp.int32), batch),
        attend=attention.dense_attend(mask, batch),
        caches=[None] * model_spec.num_layers,
    )
    return model.logits(hidden).reshape(batch, length, -1)
