"""Packs trees of small arrays into one vector of 32-bit words: one transfer each way.

An array that travels to or from the device on its own costs the host about ten microseconds and
the bus a transfer, and a decode launch has twenty arrays each way.

Letters: W words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

WORD = np.dtype(np.int32)
# In words; each array of the inputs starts at a multiple of it. XLA passes slices of the vector to
# kernels without a copy, and Mosaic kernels need arrays that start at multiples of 256 bytes.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each leaf of a tree lies in the vector; leaves are bool, int32, uint32 or float32.

    `starts` holds the first word of each leaf.
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

    def pack(self, tree: Any, num_words: int) -> Int32[np.ndarray, " W"]:
        """Returns a vector of `num_words` that begins with a tree of numpy arrays and scalars."""
        words = np.zeros((num_words,), WORD)
        for start, shape, leaf in zip(self.starts, self.shapes, jax.tree.leaves(tree), strict=True):
            leaf = np.asarray(leaf)
            if leaf.shape != shape:
                raise ValueError(f"a leaf of {leaf.shape=} where the layout has {shape}")
            flat = np.ascontiguousarray(leaf).reshape(-1)
            words[start : start + flat.size] = flat if flat.dtype == bool else flat.view(WORD)
        return words

    def unpack(self, words: Int32[Array | np.ndarray, " W"]) -> Any:
        """Returns the tree that the vector begins with: traced arrays, or numpy views."""
        leaves = [
            _from_words(words[start : start + math.prod(shape)], dtype).reshape(shape)
            for start, shape, dtype in zip(self.starts, self.shapes, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def pack_traced(tree: Any) -> Int32[Array, " W"]:
    """Returns the words of a tree of traced arrays, without gaps between the arrays."""
    return jnp.concatenate([_to_words(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])


@dataclasses.dataclass(frozen=True, slots=True)
class Folding:
    """How a loop carries a tree of arrays: its scalars and vectors become one vector of words.

    Otherwise each array that a step changes costs a kernel or a copy, however short it is.
    """

    structure: Any
    is_short: tuple[bool, ...]  # for each leaf
    layout: Layout  # of the short leaves

    @classmethod
    def of(cls, tree: Any) -> Folding:
        """Returns how to fold trees like this one."""
        leaves, structure = jax.tree.flatten(tree)
        layout = Layout.of([leaf for leaf in leaves if leaf.ndim < 2])
        return cls(structure, tuple(leaf.ndim < 2 for leaf in leaves), layout)

    def fold(self, tree: Any) -> tuple[Int32[Array, " W"], list[Array]]:
        """Returns the words of the short leaves, and the other leaves."""
        leaves = jax.tree.leaves(tree)
        return (
            pack_traced([leaf for leaf in leaves if leaf.ndim < 2]),
            [leaf for leaf in leaves if leaf.ndim >= 2],
        )

    def unfold(self, folded: tuple[Int32[Array, " W"], list[Array]]) -> Any:
        """Returns the tree that was folded."""
        words, arrays = folded
        short, long = iter(self.layout.unpack(words)), iter(arrays)
        leaves = [next(short if is_short else long) for is_short in self.is_short]
        return jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedLaunch:
    """A jitted launch (params, memory, words) -> (memory, words), and the layouts of its words.

    It donates memory and words, int32 [num_words]. The words hold the inputs before the launch and
    the outputs after it, both from the first word on.
    """

    launch: Callable[..., Any]
    inputs: Layout
    outputs: Layout
    sharding: jax.sharding.Sharding | None = None  # of the words; None is one device

    @property
    def num_words(self) -> int:
        return max(self.inputs.num_words, self.outputs.num_words) + 1

    @property
    def words(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_words,), WORD, sharding=self.sharding)

    def pack(self, inputs: Any) -> Int32[np.ndarray, " W"]:
        """Returns the words of a launch with these inputs."""
        return self.inputs.pack(inputs, self.num_words)


def packed_launch(
    step: Callable[[Any, Any, Any], tuple[Any, Any]],
    arguments: tuple[Any, Any, Any],
    results: tuple[Any, Any] | None = None,
) -> PackedLaunch:
    """Returns the launch of a step (params, memory, inputs) -> (memory, outputs).

    `arguments` are those of the step, or their shapes. `results` are the shardings of memory and
    words after a launch on several devices.

    Why the outputs overwrite the inputs: if XLA may write a result at any time, it uses the
    result's buffer for intermediate values of the loops, also for those that all layers read. A
    result has another address in each launch, so every node of the CUDA graph that touches it is
    recorded again. Here the result is the buffer of the inputs. Its last word must survive to the
    end, so XLA keeps no intermediate value in it, and it reads the inputs once, at the start.
    """
    layouts = []
    inputs_layout = Layout.of(arguments[2], alignment=_ALIGNMENT)

    def packed(params: Any, memory: Any, inputs: Any) -> tuple[Any, Int32[Array, " W"]]:
        memory, outputs = step(params, memory, inputs)
        layouts.append(Layout.of(outputs))  # known only while tracing
        return memory, pack_traced(outputs)

    packed = jax.jit(packed)  # so that one trace serves both the shapes and the launch

    def launch(params: Any, memory: Any, words: Int32[Array, " W"]) -> tuple[Any, Array]:
        memory, outputs = packed(params, memory, inputs_layout.unpack(words))
        return memory, jax.lax.dynamic_update_slice(words, outputs, (0,))

    jax.eval_shape(packed, *arguments)
    return PackedLaunch(
        launch=jax.jit(launch, donate_argnums=(1, 2), out_shardings=results),
        inputs=inputs_layout,
        outputs=layouts[0],
        sharding=None if results is None else results[1],
    )


def _to_words(leaf: Shaped[Array, " ..."]) -> Int32[Array, " ..."]:
    if leaf.dtype == bool:
        return leaf.astype(WORD)
    return jax.lax.bitcast_convert_type(leaf, WORD)


def _from_words(
    words: Int32[Array | np.ndarray, " W"], dtype: np.dtype
) -> Shaped[Array | np.ndarray, " W"]:
    if dtype.kind == "b":
        return words != 0
    if isinstance(words, np.ndarray):
        return words.view(dtype)
    return jax.lax.bitcast_convert_type(words, dtype)
