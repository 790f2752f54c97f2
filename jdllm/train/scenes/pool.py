"""Scenes on the device: one ring for each size, from which every step draws its batch.

A step takes many more scenes than the host draws meanwhile, so each is learnt several times. In the
first stage rings hold pictures, in the second latents; with a teacher those of its samples, and the
noise from which it made each; of a run's own samples their advantages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jdllm.train.scenes import chunks
from jdllm.train.scenes.devices import Devices

Arrays = dict[str, jax.Array]  # by name, all with the ring's places as the first axis
# From a chunk's pictures, ids and lengths to what the ring keeps in place of the pictures.
Encode = Callable[[Arrays], Arrays]
PICTURES, LATENTS, NOISE, IDS, LENS = "pictures", "latents", "noise", "ids", "lens"
ADVANTAGE = "advantage"


class Source(Protocol):
    """What brings chunks; each has the same number of rows."""

    def take(self, *, waits: bool) -> tuple[tuple[int, int], Arrays] | None:
        """Returns a size (height, width) and rows; None if there are none yet, unless one waits.

        The next call may have another size, and a source may bring more of one than of others.
        """
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """Chunks as the host draws them; `devices` have their arrays."""

    chunks: chunks.Chunks
    devices: Devices

    def take(self, *, waits: bool) -> tuple[tuple[int, int], Arrays] | None:
        one = self.chunks.take(waits=waits)
        if one is None:
            return None
        return one.size, self.devices.put({PICTURES: one.pictures, IDS: one.ids, LENS: one.lens})

    def close(self) -> None:
        self.chunks.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A ring as a step sees it: the first `count` places are filled."""

    size: tuple[int, int]
    arrays: Arrays
    count: int


@dataclasses.dataclass(slots=True, kw_only=True)
class _Ring:
    capacity: int
    arrays: Arrays = dataclasses.field(default_factory=dict)
    written: int = 0

    @property
    def count(self) -> int:
        return min(self.written, self.capacity)

    def write(self, new: Arrays) -> None:
        """Writes rows, whose number divides the capacity, over the oldest ones."""
        if not self.arrays:
            self.arrays = _empty(new, self.capacity)
        self.arrays = _written(self.arrays, new, self.written % self.capacity)
        self.written += len(new[LENS])


class ScenePool:
    """The batches of a run, see `recipe.Batches`; `turns` are the sizes of successive views.

    Each size has an equal part of `capacity`, also one that has more turns than others.
    """

    def __init__(self, source: Source, turns: tuple[tuple[int, int], ...], *,
                 capacity: int, chunk: int, steps_per_chunk: int):  # fmt: skip
        places = places_of(capacity, turns, chunk)
        self._source, self._chunk, self._steps_per_chunk = source, chunk, steps_per_chunk
        self._turns = turns
        self._rings = {size: _Ring(capacity=places) for size in turns}
        self._encode: Encode | None = None
        self._steps = 0
        while not all(ring.written for ring in self._rings.values()):
            self._add(waits=True)

    def __next__(self) -> View:
        rings = self._rings.values()
        # Together: a size of which few are right must not make every step wait for a chunk.
        is_full = sum(ring.written for ring in rings) >= sum(ring.capacity for ring in rings)
        if not is_full or (self._steps + 1) % self._steps_per_chunk == 0:
            self._add(waits=False)
        size = self._turns[self._steps % len(self._turns)]
        self._steps += 1
        return self.view(size)

    def view(self, size: tuple[int, int]) -> View:
        ring = self._rings[size]
        return View(size=size, arrays=ring.arrays, count=ring.count)

    def encode(self, encode: Encode) -> None:
        """Replaces pictures by what `encode` makes of whole chunks, from now on."""
        self._encode = encode
        for ring in self._rings.values():
            kept: Arrays = {}
            for start in range(0, ring.count, self._chunk):
                made = encode(_rows(ring.arrays, start, self._chunk))
                kept = _written(kept or _empty(made, ring.capacity), made, start)
            del ring.arrays[PICTURES]
            ring.arrays |= kept

    def close(self) -> None:
        self._source.close()

    def _add(self, *, waits: bool) -> None:
        found = self._source.take(waits=waits)
        if found is None:
            return
        size, new = found
        if self._encode is not None:
            made = self._encode(new)
            del new[PICTURES]
            new |= made
        self._rings[size].write(new)


def places_of(capacity: int, turns: tuple[tuple[int, int], ...], chunk: int) -> int:
    """Returns how many rows each size has room for, a multiple of a chunk."""
    return max(capacity // len(set(turns)) // chunk, 1) * chunk


def draw(key: jax.Array, arrays: Arrays, count: Int[Array, ""], rows: int) -> Arrays:
    """Returns `rows` random rows of the filled places."""
    place = jax.random.randint(key, (rows,), 0, count)
    return {name: jnp.take(array, place, axis=0) for name, array in arrays.items()}


def _empty(like: Arrays, capacity: int) -> Arrays:
    return {
        name: jnp.zeros((capacity, *array.shape[1:]), array.dtype, device=array.sharding)
        for name, array in like.items()
    }


@functools.partial(jax.jit, static_argnames="count")
def _rows(arrays: Arrays, start: int, count: int) -> Arrays:
    return {
        name: jax.lax.dynamic_slice_in_dim(array, start, count) for name, array in arrays.items()
    }


@functools.partial(jax.jit, donate_argnums=0)
def _written(arrays: Arrays, new: Arrays, place: int) -> Arrays:
    return {
        name: jax.lax.dynamic_update_slice_in_dim(array, new[name], place, axis=0)
        for name, array in arrays.items()
    }
