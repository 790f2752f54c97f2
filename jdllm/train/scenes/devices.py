"""The devices of an image run: each has all weights and scenes, and computes a part of every batch.

The partitioner of XLA does the rest: what follows from split rows is split, and the gradients of
replicated weights are summed over the devices.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm import errors

_AXIS = "dp"
Tree = TypeVar("Tree")


class Devices:
    """The first `count` devices of this process. Raises a ConfigError if there are fewer."""

    def __init__(self, count: int):
        found = jax.devices()
        if count > len(found):
            raise errors.ConfigError(
                f"dp_size={count} needs as many devices, but there are {len(found)} "
                f"({found[0].platform})"
            )
        mesh = Mesh(np.array(found[:count]), (_AXIS,))
        self.whole = NamedSharding(mesh, PartitionSpec())  # of arrays that each device has
        self.rows = NamedSharding(mesh, PartitionSpec(_AXIS))  # each has a part of the first axis

    def put(self, tree: Any) -> Any:
        """Returns the arrays of a tree, also numpy's, as such that each device has."""
        return jax.device_put(tree, self.whole)

    def split(self, tree: Tree) -> Tree:
        """Has each device compute its rows of traced arrays, whose first axis they divide."""
        return jax.lax.with_sharding_constraint(tree, self.rows)

    def shapes(self, tree: Any) -> Any:
        """Returns the shapes of arrays that each device has."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.whole), tree
        )
