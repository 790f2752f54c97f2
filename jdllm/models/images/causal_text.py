"""What text encoders from causal language models share: their layers over padded captions.

The layers are those of the decoder that language models share. They take packed tokens, so all
captions of a batch are packed with their padding, and attention unpacks them.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

import pallas_kernels
from jdllm import errors
from jdllm.layers import attention, rope
from jdllm.models import decoder, hf_config

_ROPE_KEYS = frozenset({"rope_theta", "rope_type", "type"})

Packed = Float[Array, "B*L D"]


def run(
    layers: Iterable[decoder.DecoderLayer],
    words: Float[Array, "B L D"],
    lens: Int32[Array, " B"],
    *,
    kind: rope.RopeConfig,
    implementation: str,
) -> tuple[Packed, tuple[Packed, ...]]:
    """Returns the residual stream after the layers, and the arrays that it still lacks.

    A token sees those before it in its row. What stands past the length of a row changes nothing
    in it.
    """
    B, L, _ = words.shape
    positions = jnp.tile(jnp.arange(L, dtype=jnp.int32), B)
    angles = rope.rope_angles(positions, rotary_dim=kind.rotary_dim, theta=kind.theta)
    x = words.reshape(B * L, -1)
    attend = functools.partial(_attend, jnp.maximum(lens, 1), implementation)
    pending: tuple[jax.Array, ...] = ()
    for layer in layers:
        x, pending, _ = layer(x, pending, {kind: angles}, attend=attend, cache=None)
    return x, pending


def unpacked(x: Packed, lens: Int32[Array, " B"], L: int) -> Float[Array, "B L D"]:
    """Returns the rows of a batch, with zeros past their lengths."""
    x = x.reshape(len(lens), L, -1)
    return jnp.where((jnp.arange(L) < lens[:, None])[:, :, None], x, 0)


def _attend(
    lens: Int32[Array, " B"],
    implementation: str,
    projection: attention.Projection,
    cache: Array | None,
) -> tuple[Array, Array | None]:
    """Returns causal attention inside each of the packed rows, which all have the same bucket."""
    q, k, v = (x.reshape(len(lens), -1, *x.shape[1:]) for x in projection.heads())
    out = pallas_kernels.padded_attention(
        q, k, v, lens, is_causal=True, implementation=implementation
    )
    return out.reshape(-1, *out.shape[2:]), cache


def rope_theta(
    hf: Mapping[str, Any], *, types: tuple[str, ...] = ("default",), read: tuple[str, ...] = ()
) -> float:
    """Returns the base of the rotary frequencies, from the top level or from the rope options.

    transformers 4 calls these `rope_scaling`, transformers 5 `rope_parameters`. `types` are those
    that do not change the angles, `read` other keys that the caller reads.
    """
    found = {"rope_theta": hf["rope_theta"]} if hf.get("rope_theta") is not None else {}
    for name in ("rope_parameters", "rope_scaling"):
        options = hf.get(name) or {}
        if not isinstance(options, Mapping):
            refuse(f"{name}={errors.quote(options)} must be an object")
        for key in ("rope_type", "type"):
            if options.get(key, types[0]) not in types:
                refuse(f"{name}.{key}={errors.quote(options[key])} is not supported")
        for key, value in options.items():
            if key not in (*_ROPE_KEYS, *read) and value is not None:
                refuse(f"{name}.{key}={errors.quote(value)} is not supported")
        if options.get("rope_theta") is not None:
            found[f"{name}.rope_theta"] = options["rope_theta"]
    if not found:
        refuse("rope_theta is missing")
    values = {key: hf_config.number(found, key) for key in found}
    if len(set(values.values())) > 1:
        refuse(" and ".join(f"{key}={value:g}" for key, value in values.items()) + " disagree")
    return next(iter(values.values()))


def refuse(reason: str) -> typing.NoReturn:
    """Raises a ConfigError of a config.json."""
    raise errors.ConfigError(f"config.json: {reason}")
