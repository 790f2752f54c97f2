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
# Words, of inputs: XLA hands slices to kernels where they lie, and Mosaic's want their arrays at
# multiples of 256 bytes.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each leaf of a tree lies in the vector; leaves are bool, int32, uint32 or float32.

    `starts`: the word at which each begins.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    starts: tuple[int, ...]
    num_words: int

    @classmethod
    def of(cls, tree: Any, *, alignment: int = 1) -> Layout:
        """Returns the layout of a tree of arrays, or of their `ShapeDtypeStruct`s."""
        leaves, structure = jax.tree.flatten(tree)
        starts, end = [], 0
        for leaf in leaves:
            if leaf.dtype != bool and leaf.dtype.itemsize != WORD.itemsize:
                raise ValueError(f"only bool and 32-bit leaves are packed: {leaf.dtype=}")
            starts.append(-(-end // alignment) * alignment)
            end = starts[-1] + math.prod(leaf.shape)
        return cls(
            structure=structure,
            shapes=tuple(tuple(leaf.shape) for leaf in leaves),
            dtypes=tuple(np.dtype(leaf.dtype) for leaf in leaves),
            starts=tuple(starts),
            num_words=end,
        )

    def pack(self, tree: Any, num_words: int) -> np.ndarray:
        """Returns a vector of `num_words` that begins with a tree of numpy arrays and scalars."""
        words = np.zeros((num_words,), WORD)
        for start, shape, leaf in zip(self.starts, self.shapes, jax.tree.leaves(tree), strict=True):
            leaf = np.asarray(leaf)
            if leaf.shape != shape:
                raise ValueError(f"a leaf of {leaf.shape=} where the layout has {shape}")
            flat = np.ascontiguousarray(leaf).reshape(-1)
            words[start : start + flat.size] = flat if flat.dtype == bool else flat.view(WORD)
        return words

    def unpack(self, words: jax.Array | np.ndarray) -> Any:
        """Returns the tree of a vector that begins with its words: traced, or views of numpy's."""
        leaves = [
            _from_words(words[start : start + math.prod(shape)], dtype).reshape(shape)
            for start, shape, dtype in zip(self.starts, self.shapes, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def pack_traced(tree: Any) -> jax.Array:
    """Returns the vector of a tree of traced arrays, without alignment."""
    return jnp.concatenate([_to_words(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])


@dataclasses.dataclass(frozen=True, slots=True)
class Folding:
    """How a tree of arrays travels through a loop: its scalars and vectors in one vector of words.

    Each array that a step changes costs a kernel or a copy of its own, however short it is.
    """

    structure: Any
    is_short: tuple[bool, ...]  # of each leaf
    layout: Layout  # of the short ones

    @classmethod
    def of(cls, tree: Any) -> Folding:
        """Returns how to fold trees like this one."""
        leaves, structure = jax.tree.flatten(tree)
        layout = Layout.of([leaf for leaf in leaves if leaf.ndim < 2])
        return cls(structure, tuple(leaf.ndim < 2 for leaf in leaves), layout)

    def fold(self, tree: Any) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the words and the other arrays."""
        leaves = jax.tree.leaves(tree)
        return (
            pack_traced([leaf for leaf in leaves if leaf.ndim < 2]),
            [leaf for leaf in leaves if leaf.ndim >= 2],
        )

    def unfold(self, folded: tuple[jax.Array, list[jax.Array]]) -> Any:
        """Returns the tree."""
        words, arrays = folded
        short, long = iter(self.layout.unpack(words)), iter(arrays)
        leaves = [next(short if is_short else long) for is_short in self.is_short]
        return jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedLaunch:
    """A jitted launch (params, memory, words) -> (memory, words), and what its words are.

    It donates memory and words, int32 [num_words]: they come as the inputs and return as the
    outputs, both from the first word on.
    """

    launch: Callable[..., Any]
    inputs: Layout
    outputs: Layout

    @property
    def num_words(self) -> int:
        return max(self.inputs.num_words, self.outputs.num_words) + 1

    @property
    def words(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_words,), WORD)

    def pack(self, inputs: Any) -> np.ndarray:
        """Returns the words of a launch with these inputs."""
        return self.inputs.pack(inputs, self.num_words)


def packed_launch(
    step: Callable[[Any, Any, Any], tuple[Any, Any]], arguments: tuple[Any, Any, Any]
) -> PackedLaunch:
    """Returns a step (params, memory, inputs) -> (memory, outputs) as a launch.

    `arguments` are those of the step, or their shapes.

    In a result that it may write at any time XLA keeps intermediate values of the loops, what all
    layers read among them. A result has another address in each launch, and what touches it in the
    launch's CUDA graph is recorded anew. Here it is the buffer of the inputs, whose last word is
    kept to the end: it holds no intermediate value, and inputs are read from it once, at the start.
    """
    layouts = []
    inputs_layout = Layout.of(arguments[2], alignment=_ALIGNMENT)

    def packed(params: Any, memory: Any, inputs: Any) -> tuple[Any, jax.Array]:
        memory, outputs = step(params, memory, inputs)
        layouts.append(Layout.of(outputs))  # known once traced
        return memory, pack_traced(outputs)

    packed = jax.jit(packed)  # traced once for the shapes and the launch

    def launch(params: Any, memory: Any, words: jax.Array) -> tuple[Any, jax.Array]:
        memory, outputs = packed(params, memory, inputs_layout.unpack(words))
        return memory, jax.lax.dynamic_update_slice(words, outputs, (0,))

    jax.eval_shape(packed, *arguments)
    return PackedLaunch(
        launch=jax.jit(launch, donate_argnums=(1, 2)), inputs=inputs_layout, outputs=layouts[0]
    )


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
