"""Draws each rank's part of a random parameter where it stays: nothing travels, nothing is whole.

The numbers are those that `jax.random.normal` draws for the whole parameter, so a model of random
weights is the same for every number of ranks. There each number depends on its index in the whole
array alone (threefry, which JAX calls partitionable); here a rank asks for its own indices.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, UInt32

from jdllm.device import sharding

KIND = "threefry2x32"  # of keys
MOST_INDICES = 1 << 32  # in the whole array; larger ones have a second word, which is 0 here


def normal(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, how: sharding.Cut | None, mesh: Mesh
) -> jax.Array:
    """Returns what `sharding.place` makes of `jax.random.normal`, drawn on each device of a mesh.

    Raises ValueError for arrays of 2^32 numbers or more.
    """
    if math.prod(shape) >= MOST_INDICES:
        raise ValueError(f"{shape} has more numbers than are drawn in parts")
    with jax.threefry_partitionable(True):
        return _program(shape, jnp.dtype(dtype), how, mesh)(jax.random.key_data(key))


@functools.lru_cache(maxsize=64)  # layers have the same shapes; a compilation takes a second
def _program(
    shape: tuple[int, ...], dtype: jnp.dtype, how: sharding.Cut | None, mesh: Mesh
) -> jax.stages.Wrapped:
    if how is None:
        whole = NamedSharding(mesh, sharding.REPLICATED)
        return jax.jit(
            lambda data: jax.random.normal(jax.random.wrap_key_data(data, impl=KIND), shape, dtype),
            out_shardings=whole,
        )
    tp = mesh.devices.size
    of_ranks = np.stack(
        [
            np.concatenate([np.arange(shape[how.axis])[one] for one in how.slices(rank, tp)])
            for rank in range(tp)
        ]
    ).astype(np.uint32)
    part = sharding.local_shape(shape, how, tp)

    def random_bits(data: Array, bit_width: int, wanted: tuple[int, ...]) -> Array:
        assert wanted == part, "the key draws nothing else"
        rows = jnp.asarray(of_ranks)[data[2].astype(jnp.int32)]
        along = [
            rows if axis == how.axis else jnp.arange(size, dtype=jnp.uint32)
            for axis, size in enumerate(part)
        ]
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

        def bits_of(first: UInt32[Array, " n"]) -> Array:
            index = jnp.zeros((), jnp.uint32)
            for axis, one in enumerate([first, *along[1:]]):
                lifted = one.reshape(-1, *[1] * (len(part) - axis - 1))
                index = index + lifted * jnp.uint32(strides[axis])
            counts = jnp.concatenate([jnp.zeros_like(index.ravel()), index.ravel()])
            high, low = jnp.split(jax.extend.random.threefry_2x32((data[0], data[1]), counts), 2)
            # As threefry does: https://github.com/jax-ml/jax, `_threefry_random_bits_partitionable`
            return (high ^ low).astype(f"uint{bit_width}").reshape(index.shape)

        if len(part) < 3:
            return bits_of(along[0])
        # Of experts one at a time: counts have four times the bytes of what is drawn, and more.
        return jax.lax.map(lambda first: bits_of(first[None])[0], along[0])

    impl = jax.extend.random.define_prng_impl(
        key_shape=(3,),  # threefry's two words, and the rank
        seed=_unused,
        split=_unused,
        random_bits=random_bits,
        fold_in=_unused,
        name=f"part {shape} {how} of {tp}",
        tag="part",
    )

    def on_rank(data: UInt32[Array, " 2"]) -> jax.Array:
        rank = jax.lax.axis_index(sharding.AXIS).astype(jnp.uint32)
        key = jax.random.wrap_key_data(jnp.concatenate([data, rank[None]]), impl=impl)
        return jax.random.normal(key, part, dtype)[None]

    everywhere = jax.shard_map(
        on_rank, mesh=mesh, in_specs=PartitionSpec(), out_specs=sharding.SPLIT, check_vma=False
    )
    return jax.jit(everywhere)


def _unused(*_: object) -> Array:
    raise NotImplementedError("these keys only draw")
