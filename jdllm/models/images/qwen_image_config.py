"""The sizes of a Qwen-Image transformer: its config.json, and the work of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.device import sharding
from jdllm.models import hf_config
from jdllm.models.images import diffusers_config, split
from jdllm.models.images.double_stream import MLP_RATIO
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
class QwenImageConfig(split.SplitConfig):
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
        diffusers_config.check_even("axes_dims_rope", self.axes_dims_rope)

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def heads(self) -> sharding.Heads:
        heads = self.num_attention_heads
        return sharding.Heads(query=heads, kv=heads, dim=self.attention_head_dim)

    @property
    def feed_forward_width(self) -> int:
        return MLP_RATIO * self.dim


def read(hf: Mapping[str, Any]) -> QwenImageConfig:
    """Returns the config of a parsed config.json; a missing key has the default of the class.

    Raises a ConfigError that names the key for an unknown key, and for a value that is wrong or
    not implemented.
    """
    values = diffusers_config.values(hf, _DEFAULTS, only_default=_ONLY_DEFAULT)
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
        axes_dims_rope=diffusers_config.axes(values, "axes_dims_rope"),
    )


def flops(config: QwenImageConfig, image_tokens: int, caption_tokens: int) -> int:
    """Returns the operations of one forward of one row, 2 for a multiply-add.

    Linear layers and attention of the blocks count; the rest is far below one percent.
    """
    D, tokens = config.dim, image_tokens + caption_tokens
    return config.num_layers * (2 * 12 * D * D * tokens + 4 * D * tokens * tokens)
