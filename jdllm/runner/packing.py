"""Trees of small arrays as one vector of 32-bit words: one transfer to the device, one back.

Every array that goes to a launch or comes from it on its own costs the host some ten microseconds
and the bus a transfer; a decode launch has twenty of them each way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WORD = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each leaf of a tree lies in the vector; leaves are bool, int32, uint32 or float32."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, tree: Any) -> Layout:
        """Returns the layout of a tree of arrays, or of their `ShapeDtypeStruct`s."""
        leaves, structure = jax.tree.flatten(tree)
        for leaf in leaves:
            if leaf.dtype != bool and leaf.dtype.itemsize != WORD.itemsize:
                raise ValueError(f"only bool and 32-bit leaves are packed: {leaf.dtype=}")
        return cls(
            structure=structure,
            shapes=tuple(tuple(leaf.shape) for leaf in leaves),
            dtypes=tuple(np.dtype(leaf.dtype) for leaf in leaves),
        )

    @property
    def num_words(self) -> int:
        return sum(map(math.prod, self.shapes))

    def unpack(self, words: jax.Array | np.ndarray) -> Any:
        """Returns the tree of a vector that begins with its words: traced, or views of numpy's."""
        leaves, at = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = math.prod(shape)
            leaves.append(_from_words(words[at : at + size], dtype).reshape(shape))
            at += size
        return jax.tree.unflatten(self.structure, leaves)


def pack(tree: Any) -> np.ndarray:
    """Returns the vector of a tree of numpy arrays and scalars."""
    return np.concatenate(
        [
            (leaf.astype(WORD) if leaf.dtype == bool else leaf.view(WORD)).reshape(-1)
            for leaf in map(np.ascontiguousarray, jax.tree.leaves(tree))
        ]
    )


def pack_traced(tree: Any) -> jax.Array:
    """Returns the vector of a tree of traced arrays."""
    return jnp.concatenate([_to_words(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])


def packed_launch(
    step: Callable[[Any, Any, Any], tuple[Any, Any]], arguments: tuple[Any, Any, Any]
) -> tuple[Callable[..., Any], Layout]:
    """Returns a step as a launch, jitted, and the layout of its outputs.

    From a step (params, memory, inputs) -> (memory, outputs) it makes (params, memory, inputs,
    words) -> (memory, words) that donates memory and words: the outputs are packed into the buffer
    of `words`, int32 [result_words(layout)]. `arguments` are those of the step, or their shapes.

    In a result that it may write at any time XLA keeps intermediate values of the loops, what all
    layers read among them. A result has another address in each launch, and what touches it in the
    launch's CUDA graph is recorded anew. Here it is an argument whose last word is kept to the end,
    so nothing else touches it.
    """
    layouts = []

    def packed(params: Any, memory: Any, inputs: Any) -> tuple[Any, jax.Array]:
        memory, outputs = step(params, memory, inputs)
        layouts.append(Layout.of(outputs))  # known once traced
        return memory, pack_traced(outputs)

    packed = jax.jit(packed)  # traced once for the shapes and the launch

    def launch(params: Any, memory: Any, inputs: Any, words: jax.Array) -> tuple[Any, jax.Array]:
        memory, outputs = packed(params, memory, inputs)
        return memory, jax.lax.dynamic_update_slice(words, outputs, (0,))

    jax.eval_shape(packed, *arguments)
    return jax.jit(launch, donate_argnums=(1, 3)), layouts[0]


def result_words(layout: Layout) -> int:
    """Returns the length of the vector in which a launch returns its outputs."""
    return layout.num_words + 1


def _to_words(leaf: jax.Array) -> jax.Array:
    if leaf.dtype == bool:
        return leaf.astype(WORD)
    return jax.lax.bitcast_convert_type(leaf, WORD)


def _from_words(words: jax.Array | np.ndarray, dtype: np.dtype) -> jax.Array | np.ndarray:
    if dtype.kind == "b":
        return words != 0
    if isinstance(words, np.ndarray):
        return words.view(dtype)
    return jax.lax.bitcast_convert_type(words, dtype)
