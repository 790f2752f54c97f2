"""Random weights that give activations of variance 1, whatever the depth.

Embeddings have variance 1, linear weights and convolutions [height, width, in, out] have a standard
deviation of 1/sqrt(fan_in), norms are one and biases zero. Numbers come from JAX on the devices, or
from numpy where compiling a draw for each shape would take longer than the draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.models import random_parts, split

_RESIDUAL = frozenset({"w_out", "w_down"})  # what layers add to the residual stream
Shapes = Mapping[str, jax.ShapeDtypeStruct]  # by paths


def drawn(shapes: Shapes, *, seed: int = 0, num_layers: int | None = None) -> dict[str, jax.Array]:
    """Returns what `each` yields, on the default device."""
    return dict(each(shapes, seed=seed, num_layers=num_layers))


def each(
    shapes: Shapes,
    *,
    seed: int = 0,
    place: split.Placement | None = None,
    num_layers: int | None = None,
) -> Iterator[tuple[str, jax.Array]]:
    """Yields random weights one by one, and keeps none.

    They are on the default device, or the same where `place` puts them: each device draws its part.
    With `num_layers`, what a layer adds to the residual stream is divided by sqrt(2 num_layers), as
    in GPT-2 (Radford et al., 2019, section 2.3). Otherwise the tokens of a deep model grow alike,
    and all go to the same experts: 17 of LLaDA2.0-flash's 256 had the 32 tokens of a block in its
    last layer, not 163.
    """
    residual = 1.0 if num_layers is None else (2 * num_layers) ** -0.5
    key = jax.random.key(seed, impl=random_parts.KIND)
    for i, (path, array) in enumerate(sorted(shapes.items())):
        of_path = jax.random.fold_in(key, i)
        constant = _constant(path, array.shape)
        if constant is not None:
            filled = jnp.full(array.shape, constant, array.dtype)
            if place is None:
                yield path, filled
            else:
                yield from place(path, np.asarray(filled)).items()
        elif place is None:
            with jax.threefry_partitionable(True):  # as `random_parts` draws
                normal = jax.random.normal(of_path, array.shape, array.dtype)
            yield path, _scaled(path, array, normal, residual)
        else:
            for one in place.paths(path):
                cut = place.cuts[one]
                normal = random_parts.normal(of_path, array.shape, array.dtype, cut, place.mesh)
                yield one, jax.block_until_ready(_scaled(path, array, normal, residual))


def on_host(shapes: Shapes, *, seed: int) -> dict[str, np.ndarray]:
    """Returns float32 weights like those of `drawn`, of other numbers; nothing is compiled."""
    rng, weights = np.random.default_rng(seed), {}
    for path, array in shapes.items():
        constant = _constant(path, array.shape)
        if constant is None:
            normal = rng.standard_normal(array.shape, np.float32)
            weights[path] = normal * np.float32(_deviation(path, array.shape))
        else:
            weights[path] = np.full(array.shape, constant, np.float32)
    return weights


def _constant(path: str, shape: tuple[int, ...]) -> float | None:
    """Returns what all numbers of a parameter are, None if they are drawn."""
    if path.endswith("bias") or path.rpartition(".")[2].startswith("b_"):
        return 0.0
    return 1.0 if len(shape) == 1 else None


def _scaled(
    path: str, whole: jax.ShapeDtypeStruct, normal: jax.Array, residual: float
) -> jax.Array:
    """Returns what was drawn for a parameter, or for a part of it, as its weights."""
    share = residual if path.rpartition(".")[2] in _RESIDUAL else 1.0
    return normal * jnp.asarray(share * _deviation(path, whole.shape), whole.dtype)


def _deviation(path: str, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation of a parameter: 1/sqrt(fan_in), of embeddings 1."""
    if path == "word_embeddings":
        return 1.0
    if len(shape) == 4:  # a convolution
        return math.prod(shape[:-1]) ** -0.5
    # The contracted axis is the last one, except in routers, which are [in, out].
    return shape[0 if path.endswith("router.weight") else -1] ** -0.5
