"""The config.json of `AutoencoderKL`: what is read, and what is refused by its key."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from jdllm import errors
from jdllm.models import hf_config

# Keys without effect here: force_upcast is advice for float16; sample_size, which sets the tiles of
# diffusers, is what the engine takes for the size of images that do not say.
_HARMLESS = ("force_upcast", "sample_size")
# The implemented value of a key; a missing key means it, too.
_ONLY: Mapping[str, Any] = {
    "act_fn": "silu",
    "in_channels": 3,
    "out_channels": 3,
    "latents_mean": None,
    "latents_std": None,
}
_BLOCK_TYPES = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
_MOST_BLOCKS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutoencoderConfig:
    """The sizes of an autoencoder; `block_channels` in the order of the encoder.

    The pipeline's latents are `(z - shift_factor) * scaling_factor`.
    """

    block_channels: tuple[int, ...]
    layers_per_block: int
    latent_channels: int
    num_groups: int
    scaling_factor: float
    shift_factor: float
    has_mid_attention: bool
    has_quant_conv: bool
    has_post_quant_conv: bool

    @property
    def scale(self) -> int:
        """Pixels per position of a latent, on each side."""
        return 2 ** (len(self.block_channels) - 1)


def read(hf: Mapping[str, Any]) -> AutoencoderConfig:
    """Returns the config; raises a ConfigError that names the first key that cannot be served.

    Keys that begin with an underscore are bookkeeping of diffusers. Missing flags have the
    defaults of its class.
    """
    for key, only in _ONLY.items():
        if hf.get(key, only) != only:
            _refuse(key, hf[key], repr(only))
    channels = _channels(hf)
    for key, kind in _BLOCK_TYPES.items():
        if hf.get(key) != [kind] * len(channels):
            _refuse(key, hf.get(key), f"{kind!r} for each of block_out_channels")
    groups = hf_config.integer(hf, "norm_num_groups")
    if any(width % groups for width in channels):
        _refuse("norm_num_groups", groups, f"a divisor of each of block_out_channels={channels}")
    config = AutoencoderConfig(
        block_channels=tuple(channels),
        layers_per_block=hf_config.integer(hf, "layers_per_block", high=64),
        latent_channels=hf_config.integer(hf, "latent_channels"),
        num_groups=groups,
        scaling_factor=hf_config.number(hf, "scaling_factor"),
        shift_factor=_shift(hf),
        has_mid_attention=_flag(hf, "mid_block_add_attention"),
        has_quant_conv=_flag(hf, "use_quant_conv"),
        has_post_quant_conv=_flag(hf, "use_post_quant_conv"),
    )
    _refuse_unknown(hf)
    hf_config.integer(hf, "sample_size", default=1)  # may be missing
    return config


def flops(config: AutoencoderConfig, height: int, width: int) -> int:
    """Returns the floating-point operations of decoding latents [height, width].

    Two for each multiply-add of convolutions, linears and attention; norms are left out.
    """
    positions, top = height * width, config.block_channels[-1]
    per_position = 9 * config.latent_channels * top + 2 * _resnet(top, top)
    if config.has_post_quant_conv:
        per_position += config.latent_channels**2
    if config.has_mid_attention:
        per_position += 4 * top**2 + 2 * positions * top
    multiply_adds = positions * per_position
    before = top
    for i, after in enumerate(config.block_channels[::-1]):
        if i > 0:
            positions *= 4
            multiply_adds += positions * 9 * before**2  # the upsampler
        resnets = _resnet(before, after) + config.layers_per_block * _resnet(after, after)
        multiply_adds += positions * resnets
        before = after
    return 2 * (multiply_adds + positions * 9 * before * 3)


def _resnet(before: int, after: int) -> int:
    """Returns the multiply-adds of a resnet per position."""
    shortcut = before * after if before != after else 0
    return 9 * before * after + 9 * after**2 + shortcut


def _channels(hf: Mapping[str, Any]) -> list[int]:
    key = "block_out_channels"
    value = hf.get(key)
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= _MOST_BLOCKS:
        _refuse(key, value, f"a list of 1 to {_MOST_BLOCKS} widths")
    return [hf_config.integer({key: width}, key) for width in value]


def _flag(hf: Mapping[str, Any], key: str) -> bool:
    return hf_config.flag({key: hf.get(key, True)}, key)


def _shift(hf: Mapping[str, Any]) -> float:
    """Returns the shift; null means none, and it may be negative."""
    key = "shift_factor"
    value = hf.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and abs(value) <= sys.float_info.max):
        _refuse(key, value, "a finite number or null")
    return float(value or 0)


def _refuse_unknown(hf: Mapping[str, Any]) -> None:
    fields = (
        "block_out_channels layers_per_block latent_channels norm_num_groups scaling_factor "
        "shift_factor mid_block_add_attention use_quant_conv use_post_quant_conv"
    )
    known = {*fields.split(), *_HARMLESS, *_ONLY, *_BLOCK_TYPES}
    for key, value in hf.items():
        if key not in known and not key.startswith("_") and value is not None:
            raise errors.ConfigError(
                f"config.json: AutoencoderKL has no key {key}={errors.quote(value)}"
                f"{errors.nearest(key, known)}"
            )


def _refuse(key: str, value: Any, supported: str) -> NoReturn:
    raise errors.ConfigError(
        f"config.json: {key}={errors.quote(value)} is not supported for AutoencoderKL; "
        f"supported: {supported}"
    )
