"""Weights that wait in the host's memory and come to the device layer by layer, when used.

A text encoder runs once for a caption, and then not for many steps. So its weights may stay in
pinned host memory. A traced program gets them as they are there, and copies each layer's when it is
near: the copy may begin when the layer before the last one has ended, so at most two layers are on
the device at a time, and a layer is copied while the one before it computes. Weights that are on
the device already pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import jax
from flax import nnx

from jdllm import errors
from jdllm.device import facts

Module = TypeVar("Module", bound=nnx.Module)
Tree = TypeVar("Tree")  # of arrays


def moved_to_host(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns parameters in the host's memory; frees those on the device.

    Raises a ConfigError where JAX has no such memory.
    """
    moved = {}
    for path, array in params.items():
        (device,) = array.devices()
        if facts.HOST_MEMORY not in {memory.kind for memory in device.addressable_memories()}:
            raise errors.ConfigError(
                f"text_encoder_cpu_offload: JAX has no {facts.HOST_MEMORY} memory for "
                f"{device.platform}; leave it out"
            )
        sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=facts.HOST_MEMORY)
        # One after the other, so that what is moved is free before the next one comes.
        moved[path] = jax.block_until_ready(jax.device_put(array, sharding))
        array.delete()
    return moved


def is_on_host(array: jax.Array) -> bool:
    """Returns whether an array, or a traced one, is in the host's memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def on_device(array: jax.Array) -> jax.Array:
    """Returns an array on the device, inside a traced function."""
    return jax.device_put(array, jax.memory.Space.Device) if is_on_host(array) else array


def fetched(module: Module, *, after: Tree) -> tuple[Module, Tree]:
    """Returns a module with its weights on the device, and `after`, inside a traced function.

    The copy begins when `after`, an array or a tree of arrays, has been computed, if the caller
    goes on with the `after` that is returned: XLA drops what a barrier waits for and nobody uses.
    """
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    if not any(map(is_on_host, leaves)):
        return module, after
    # Without this, all layers could be copied before the first of them is used.
    leaves, after = jax.lax.optimization_barrier((leaves, after))
    return nnx.merge(graphdef, tree.unflatten(map(on_device, leaves))), after


def in_turn(layers: Iterable[Module], x: Tree, step: Callable[[Module, Tree], Tree]) -> list[Tree]:
    """Returns `x`, and what `step(layer, x)` makes of it layer after layer.

    Each layer is fetched when the one before the last has ended, inside a traced function.
    """
    states, last = [x], None
    for layer in layers:
        ahead, states[-1] = fetched(layer, after=states[-1])
        if last is not None:
            states.append(step(last, states[-1]))
        last = ahead
    return states if last is None else [*states, step(last, states[-1])]
