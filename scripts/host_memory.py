"""Shapes of arrays in the host's memory beside a device that is only described.

JAX asks a device which memories it has, and one that is only described has none: it drops the kind
of memory from a sharding. So both what a program is traced with and what XLA is told are given by
classes of our own; for `compiled_launches.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax._src import core

from jdllm.device import facts


class _HostSharding(jax.sharding.SingleDeviceSharding):
    """A device's memory of the host."""

    @property
    def memory_kind(self) -> str:
        return facts.HOST_MEMORY


class _HostShape(jax.ShapeDtypeStruct):
    """Traced as an array in that memory, as JAX does with arrays only."""


core.pytype_aval_mappings[_HostShape] = lambda shape: core.ShapedArray(
    shape.shape, shape.dtype, memory_space=jax.memory.Space.Host
)


def shape(leaf: Any, device: Any) -> jax.ShapeDtypeStruct:
    """Returns a shape and dtype as those of an array in the host's memory beside a device."""
    return _HostShape(np.shape(leaf), leaf.dtype, sharding=_HostSharding(device))
