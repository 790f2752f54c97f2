"""Runs the step of a program on every rank of a mesh, each with its parts of params and memory.

What is split and what is replicated is read off the arrays themselves (`sharding.py`): a split
array is `[tp, *part]`, and the step gets `part`. Inputs and outputs are replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from jdllm.device import sharding

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
PEERS = "peers"  # among params: how ranks reach one another (`peer_buffers`), if they do


def mesh_of(params: Any) -> Mesh | None:
    """Returns the mesh that parameters lie on, None if they are on one device."""
    found = next(iter(jax.tree.leaves(params)), None)
    placed = None if found is None else found.sharding
    mesh = placed.mesh if isinstance(placed, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Returns a tree with a copy of each array on every device; split arrays stay as they are."""
    whole = NamedSharding(mesh, sharding.REPLICATED)
    return jax.tree.map(
        lambda leaf: leaf if _spec(leaf) == sharding.SPLIT else jax.device_put(leaf, whole), tree
    )


def abstract(tree: Any, mesh: Mesh) -> Any:
    """Returns the shapes of a tree with their shardings; what lies on no mesh is replicated."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, _spec(leaf))
        ),
        tree,
    )


def shardings(tree: Any) -> Any:
    """Returns the sharding of each array, or shape, of a tree."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def on_every_rank(step: Step, params: Any, memory: Any, mesh: Mesh) -> Step:
    """Returns a step over the whole mesh; `params` and `memory` are arrays, or `abstract` ones.

    The step gets `params` without `PEERS`, which `sharding.peers` gives it.

    Arrays without elements are made on each rank instead of handed over: XLA replaces them by
    constants, after which the partitioner of jax 0.11.2 (Shardy, which removes operands of
    `shard_map` that are not used) crashes the process.
    """
    specs = jax.tree.map(_spec, params), jax.tree.map(_spec, memory)

    def everywhere(params: Any, memory: Any, inputs: Any) -> tuple[Any, Any]:
        given = params, memory, inputs
        in_specs = *specs, jax.tree.map(lambda _: sharding.REPLICATED, inputs)
        of_rank = jax.tree.map(_shape_on_rank, given, in_specs)

        def on_rank(given: Any) -> tuple[Any, Any]:
            params, memory, inputs = _with_empty(given, of_rank)
            mine = dict(_parts(params, specs[0]))
            peers = mine.pop(PEERS, None)
            with sharding.reaching(None if peers is None else _met(peers)):
                memory, outputs = step(mine, _parts(memory, specs[1]), inputs)
            return _without_empty(_stacked(memory, specs[1])), outputs

        memory_left, outputs = jax.shard_map(
            on_rank,
            mesh=mesh,
            in_specs=(_without_empty(in_specs, given),),
            out_specs=(_without_empty(specs[1], memory), sharding.REPLICATED),
            # What is replicated has the same bits on all ranks by construction; collectives in
            # loops hide that from the check.
            check_vma=False,
        )(_without_empty(given))
        return _with_empty(memory_left, memory), outputs

    return everywhere


def faults(result: jax.Array) -> list[str]:
    """Waits for a result on every device of a mesh; returns what went wrong on each, in order.

    JAX reads one device, and its error says nothing of the cause where it waited for another that
    could not run, until it gave up. On one device there is nothing to wait for here: [].
    """
    if len(result.sharding.device_set) == 1:
        return []
    found = []
    for shard in result.addressable_shards:
        try:
            jax.block_until_ready(shard.data)
        except jax.errors.JaxRuntimeError as error:
            found.append(f"device {shard.device.id}: {error}")
    return found


def _met(peers: pallas_kernels.Peers) -> pallas_kernels.Peers:
    """Returns `peers`, once the launch has begun on all ranks.

    A rank whose launch is still being prepared must not keep others waiting on their GPUs: what
    prepares it might wait for the device. XLA makes ranks meet at a collective of its own.
    """
    total = jax.lax.psum(peers.rank, sharding.AXIS)  # never negative, which XLA does not know
    return dataclasses.replace(peers, addresses=jnp.where(total < 0, 0, peers.addresses))


def _spec(leaf: Any) -> PartitionSpec:
    placed = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    return placed.spec if isinstance(placed, NamedSharding) else sharding.REPLICATED


def _without_empty(tree: Any, like: Any = None) -> Any:
    """Returns `tree` with None for what has no elements in it, or in `like`."""
    return jax.tree.map(
        lambda leaf, one: leaf if one.size else None, tree, tree if like is None else like
    )


def _with_empty(tree: Any, shapes: Any) -> Any:
    """Returns what `_without_empty` has got, of which these are the shapes."""
    return jax.tree.map(
        lambda one, leaf: leaf if one.size else jnp.zeros(one.shape, one.dtype), shapes, tree
    )


def _shape_on_rank(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    shape = (1, *leaf.shape[1:]) if spec == sharding.SPLIT else leaf.shape
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _parts(tree: Any, specs: Any) -> Any:
    return jax.tree.map(
        lambda leaf, spec: jnp.squeeze(leaf, 0) if spec == sharding.SPLIT else leaf, tree, specs
    )


def _stacked(tree: Any, specs: Any) -> Any:
    return jax.tree.map(
        lambda leaf, spec: leaf[None] if spec == sharding.SPLIT else leaf, tree, specs
    )
