"""The sizes of a Qwen-Image transformer: its config.json, and the work of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.models import hf_config
from jdllm.models.images.packing import PATCH

NUM_POSITIONS = 4096  # on each axis
ROPE_THETA = 10_000.0

# The keys of config.json, with the defaults of the published class.
_DEFAULTS: Mapping[str, Any] = {
    "patch_size": PATCH,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": [16, 56, 56],
    # Of models that edit images or have layers.
    "zero_cond_t": False,
    "use_additional_t_cond": False,
    "use_layer3d_rope": False,
    "pooled_projection_dim": 768,  # neutral: in old files, the class never reads it
}
_ONLY_DEFAULT = (
    "patch_size",
    "guidance_embeds",
    "zero_cond_t",
    "use_additional_t_cond",
    "use_layer3d_rope",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QwenImageConfig:
    """What config.json holds, by its names."""

    in_channels: int  # of a token: those of its latent pixels together
    num_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    axes_dims_rope: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.axes_dims_rope) != self.attention_head_dim:
            raise errors.ConfigError(
                f"config.json: attention_head_dim={self.attention_head_dim} must be "
                f"sum(axes_dims_rope)={sum(self.axes_dims_rope)}"
            )
        if any(dim % 2 for dim in self.axes_dims_rope):
            raise errors.ConfigError(
                f"config.json: axes_dims_rope={self.axes_dims_rope} must be even"
            )

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


def read(hf: Mapping[str, Any]) -> QwenImageConfig:
    """Returns the config of a parsed config.json; a missing key has the default of the class.

    Raises a ConfigError that names the key for an unknown key, and for a value that is wrong or
    not implemented.
    """
    given = {
        key: value
        for key, value in hf.items()
        if value is not None and not key.startswith("_")  # _class_name, _diffusers_version
    }
    for key, value in given.items():
        if key not in _DEFAULTS:
            raise errors.ConfigError(
                f"config.json: unknown key {key}={errors.quote(value)}"
                f"{errors.nearest(key, _DEFAULTS)}"
            )
        if key in _ONLY_DEFAULT and value != _DEFAULTS[key]:
            raise errors.ConfigError(
                f"config.json: {key}={errors.quote(value)} is not supported; supported: "
                f"{_DEFAULTS[key]}"
            )
    values = {**_DEFAULTS, **given}
    in_channels = hf_config.integer(values, "in_channels")
    out_channels = hf_config.integer(values, "out_channels")
    if in_channels != PATCH * PATCH * out_channels:
        raise errors.ConfigError(
            f"config.json: in_channels={in_channels} must be {PATCH * PATCH} times "
            f"out_channels={out_channels}: velocities have the shape of latents"
        )
    return QwenImageConfig(
        in_channels=in_channels,
        num_layers=hf_config.integer(values, "num_layers", high=hf_config.LARGEST_DEPTH),
        attention_head_dim=hf_config.integer(values, "attention_head_dim"),
        num_attention_heads=hf_config.integer(values, "num_attention_heads"),
        joint_attention_dim=hf_config.integer(values, "joint_attention_dim"),
        axes_dims_rope=_axes(values, "axes_dims_rope"),
    )


def flops(config: QwenImageConfig, image_tokens: int, caption_tokens: int) -> int:
    """Returns the operations of one forward of one row, 2 for a multiply-add.

    Linear layers and attention of the blocks count; the rest is far below one percent.
    """
    D, tokens = config.dim, image_tokens + caption_tokens
    return config.num_layers * (2 * 12 * D * D * tokens + 4 * D * tokens * tokens)


def _axes(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Returns a size for each of the three axes: frame, rows, columns."""
    value = values[key]
    is_list = isinstance(value, list | tuple)
    if not is_list or len(value) != 3 or not all(type(n) is int and n > 0 for n in value):
        raise errors.ConfigError(
            f"config.json: {key}={errors.quote(value)} must be three positive integers"
        )
    return tuple(value)
