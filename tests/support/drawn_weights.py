"""The random weights of the golden FLUX pipeline, drawn again instead of stored.

Their makers drew them with torch: one generator for each component, its tensors in the order of
their names. torch's generator is the Mersenne twister that numpy has, too. It makes 16 normal
values from 16 uniform ones by the method of Box and Muller; numpy's cosines and logarithms differ
from torch's in the last bit, so the weights are equal up to 2e-7 of their scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from jdllm.models.images import component

_CHUNK = 16
_UNIFORM_BITS = 24
_BIAS_SCALE = 0.1
_NORM_WEIGHTS = (0.6, 1.4)
_QK_NORM_SCALE = 1.7
_QK_NORMS = ("norm_q.weight", "norm_k.weight", "norm_added_q.weight", "norm_added_k.weight")
# Instead of one over the root of the number of inputs.
_SCALES = {
    "token_embedding.weight": 1.0,
    "position_embedding.weight": 0.5,
    "shared.weight": 1.0,
    "relative_attention_bias.weight": 1.0,
}
_T5_QUERIES = "SelfAttention.q.weight"  # of heads of 16, whose scores T5 does not divide by 4


def draw(one: component.Component, config: object, *, seed: int, prefix: str = ""):
    """Returns the tensors of a checkpoint (name -> float32) of a component.

    `prefix` is what the makers' names begin with; it does not change their order.
    """
    shapes = {row.name: row.shape for row in one.weight_rows(config)}
    return {prefix + name: value for name, value in tensors(shapes, seed).items()}


def tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Returns random tensors of these names and shapes; each size is a multiple of 16."""
    total = sum(math.prod(shape) for shape in shapes.values())
    words = np.random.RandomState(seed).randint(0, 2**32, size=total, dtype=np.uint32)
    uniform = (words % 2**_UNIFORM_BITS) / 2.0**_UNIFORM_BITS
    found, begin = {}, 0
    for name in sorted(shapes):
        size = math.prod(shapes[name])
        assert size % _CHUNK == 0, name
        values = _values(name, shapes[name], uniform[begin : begin + size])
        found[name] = values.astype(np.float32).reshape(shapes[name])
        begin += size
    return found


def _values(name: str, shape: tuple[int, ...], uniform: np.ndarray) -> np.ndarray:
    if name.endswith("bias"):
        return _BIAS_SCALE * _normal(uniform)
    if len(shape) == 1:
        low, high = _NORM_WEIGHTS
        values = low + (high - low) * uniform
        return values * (_QK_NORM_SCALE if name.endswith(_QK_NORMS) else 1.0)
    scales = [scale for end, scale in _SCALES.items() if name.endswith(end)]
    scale = scales[0] if scales else 1 / math.sqrt(shape[1])
    return _normal(uniform) * (scale / 4 if name.endswith(_T5_QUERIES) else scale)


def _normal(uniform: np.ndarray) -> np.ndarray:
    radius_part, angle = np.split(uniform.reshape(-1, _CHUNK), 2, axis=1)
    radius = np.sqrt(-2 * np.log(1 - radius_part))
    parts = radius * np.cos(2 * np.pi * angle), radius * np.sin(2 * np.pi * angle)
    return np.concatenate(parts, axis=1).ravel()
