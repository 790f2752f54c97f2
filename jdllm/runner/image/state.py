"""What image launches share on the device: captions in entries, all else of images in slots.

Slots and entries serve images and captions of every size. A latent is the beginning of its slot's
elements, and a caption the beginning of each axis of its entry.

Letters: R rows, N slots, E elements of the largest latent, M entries, K steps of a window of
modulation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jdllm.models.images import step_cache

MOST_PASSES = 2  # a guided step computes two forwards of a row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Where each running image stands, and what its last step took the clean latents to be."""

    latents: Float32[Array, "N E"]
    clean: Float32[Array, "N E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotResiduals:
    """The residuals (`step_cache.Residuals`) of both passes of each slot.

    Pass p of slot n is row 2n + p. Those of rows without guidance are pass 0. E are the elements of
    the largest image's tokens.
    """

    first: Float[Array, "2*N E"]
    rest: Float[Array, "2*N E"]

    @classmethod
    def empty(cls, num_slots: int, num_elements: int, dtype: jnp.dtype) -> SlotResiduals:
        """Returns residuals for tokens of up to so many elements."""
        zeros = jnp.zeros((num_slots * MOST_PASSES, num_elements), dtype)
        return cls(first=zeros, rest=zeros + 0)  # two arrays: each is donated

    def read(
        self, slot: Int32[Array, " R"], num_passes: int, shape: tuple[int, int]
    ) -> step_cache.Residuals:
        """Returns those of rows: of the first pass, then of the second; clips as `read` does."""
        place = places(slot, num_passes, MOST_PASSES)
        return step_cache.Residuals(
            first=read(self.first, place, shape), rest=read(self.rest, place, shape)
        )

    def write(
        self, slot: Int32[Array, " R"], num_passes: int, residuals: step_cache.Residuals
    ) -> SlotResiduals:
        """Returns them with those of rows; the ones of slots out of range are dropped."""
        place = places(slot, num_passes, MOST_PASSES)
        return SlotResiduals(
            first=write(self.first, place, residuals.first),
            rest=write(self.rest, place, residuals.rest),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotModulations:
    """The modulation of K steps of each slot: a tree of float32 arrays [P*N, K, ...].

    P is 2 where it depends on the caption, and pass p of slot n is row 2n + p; else 1. The numbers
    are those of the product that made them, not rounded to 16 bits: a step computes what it would
    with a product of its own. That is K * P times 4.2 MB a slot for FLUX.1-dev (its pipeline has P
    = 2) and K times 8.9 MB for Qwen-Image.
    """

    windows: Any

    @classmethod
    def empty(cls, num_slots: int, num_passes: int, num_steps: int, shapes: Any) -> SlotModulations:
        """Returns windows for modulations of these shapes, which are those of one row and step."""
        return cls(
            windows=jax.tree.map(
                lambda one: jnp.zeros((num_slots * num_passes, num_steps, *one.shape), one.dtype),
                shapes,
            )
        )

    def read(self, row: Int32[Array, " R"], place: Int32[Array, " R"]) -> Any:
        """Returns those at one place of each row; rows out of range are the last."""
        return jax.tree.map(lambda held: held.at[row, place].get(mode="clip"), self.windows)

    def write(self, row: Int32[Array, " R"], windows: Any) -> SlotModulations:
        """Returns them with these windows [R, K, ...]; those for rows out of range are dropped.

        No two rows may be the same, in range or not.
        """
        return SlotModulations(
            windows=jax.tree.map(
                lambda held, new: held.at[row].set(new, mode="drop", unique_indices=True),
                self.windows,
                windows,
            )
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captions:
    """The captions in entries: a tree of arrays [M, ...], as the pipeline keeps one (`shapes`).

    What an entry holds beyond its caption is zero. Attention weighs it with zero, so it must be
    finite, whatever the entry held before.
    """

    entries: Any

    @classmethod
    def empty(cls, num_entries: int, shapes: Any) -> Captions:
        """Returns entries for captions of up to these shapes."""
        return cls(
            entries=jax.tree.map(
                lambda shape: jnp.zeros((num_entries, *shape.shape), shape.dtype), shapes
            )
        )

    def read(self, entry: Int32[Array, " R"], shapes: Any) -> Any:
        """Returns captions of these shapes; entries out of range are the last."""
        return jax.tree.map(
            lambda held, shape: held.at[(entry, *_beginning(shape.shape))].get(mode="clip"),
            self.entries,
            shapes,
        )

    def write(self, entry: Int32[Array, " R"], captions: Any) -> Captions:
        """Returns the store with these captions; those for entries out of range are dropped.

        No two rows may have the same entry, in range or not.
        """

        def of_leaf(held: Array, new: Array) -> Array:
            missing = [(0, whole - part) for whole, part in zip(held.shape[1:], new.shape[1:])]
            padded = jnp.pad(new.astype(held.dtype), [(0, 0), *missing])
            return held.at[entry].set(padded, mode="drop", unique_indices=True)

        return Captions(entries=jax.tree.map(of_leaf, self.entries, captions))


def empty_slots(num_slots: int, num_elements: int) -> Slots:
    """Returns slots for latents of up to so many elements."""
    zeros = jnp.zeros((num_slots, num_elements), jnp.float32)
    return Slots(latents=zeros, clean=zeros + 0)  # two arrays: each is donated


def read(
    held: Float[Array, "N E"], slot: Int32[Array, " R"], shape: tuple[int, ...]
) -> Float[Array, "R ..."]:
    """Returns latents of this shape; slots out of range are the last."""
    flat = held.at[slot, : math.prod(shape)].get(mode="clip")
    return flat.reshape(len(slot), *shape)


def write(
    held: Float[Array, "N E"], slot: Int32[Array, " R"], latents: Float[Array, "R ..."]
) -> Float[Array, "N E"]:
    """Returns the slots with these latents; those for slots out of range are dropped.

    No two rows may have the same slot, in range or not.
    """
    flat = latents.reshape(len(latents), -1)
    return held.at[slot, : flat.shape[1]].set(flat, mode="drop", unique_indices=True)


def places(slot: Int32[Array, " R"], num_passes: int, most: int) -> Int32[Array, " P*R"]:
    """Returns the rows of slots that have `most` each: of the first pass, then of the second."""
    return jnp.concatenate([slot * most + i for i in range(num_passes)])


def _beginning(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)
