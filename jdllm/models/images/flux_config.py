"""The sizes of a FLUX.1 transformer: its config.json, and the work of a forward."""

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

# The keys of config.json, with the defaults of the published class.
_DEFAULTS: Mapping[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": None,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": [16, 56, 56],
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FluxConfig(split.SplitConfig):
    """What config.json holds, by its names. `in_channels` are those of a token, in and out."""

    in_channels: int
    num_layers: int
    num_single_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    pooled_projection_dim: int
    guidance_embeds: bool
    axes_dims_rope: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.axes_dims_rope) != self.attention_head_dim:
            raise errors.ConfigError(
                f"config.json: axes_dims_rope={self.axes_dims_rope} must add up to "
                f"attention_head_dim={self.attention_head_dim}"
            )
        diffusers_config.check_even("axes_dims_rope", self.axes_dims_rope)
        if self.in_channels % PATCH**2:
            raise errors.ConfigError(
                f"config.json: in_channels={self.in_channels} must be a multiple of {PATCH**2}"
            )

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

    @property
    def latent_channels(self) -> int:
        return self.in_channels // PATCH**2


def read(hf: Mapping[str, Any]) -> FluxConfig:
    """Returns the config of a parsed config.json; a missing key has the default of the class.

    Raises a ConfigError that names the key for an unknown key, and for a value that is wrong or
    not implemented.
    """
    values = diffusers_config.values(hf, _DEFAULTS, only_default=("patch_size",))
    in_channels = hf_config.integer(values, "in_channels")
    if values["out_channels"] not in (None, in_channels):
        raise errors.ConfigError(
            f"config.json: out_channels={errors.quote(values['out_channels'])} is not supported; "
            f"supported: {in_channels}"
        )
    return FluxConfig(
        in_channels=in_channels,
        num_layers=hf_config.integer(values, "num_layers", high=hf_config.LARGEST_DEPTH),
        num_single_layers=hf_config.integer(
            values, "num_single_layers", high=hf_config.LARGEST_DEPTH
        ),
        attention_head_dim=hf_config.integer(values, "attention_head_dim"),
        num_attention_heads=hf_config.integer(values, "num_attention_heads"),
        joint_attention_dim=hf_config.integer(values, "joint_attention_dim"),
        pooled_projection_dim=hf_config.integer(values, "pooled_projection_dim"),
        guidance_embeds=hf_config.flag(values, "guidance_embeds"),
        axes_dims_rope=diffusers_config.axes(values, "axes_dims_rope"),
    )


def flops(config: FluxConfig, image_tokens: int, text_tokens: int) -> int:
    """Returns the operations of one forward of one row, 2 for a multiply-add.

    Linear layers and attention of the blocks count; the rest is far below one percent.
    """
    D, tokens = config.dim, image_tokens + text_tokens
    # Attention has four products of D x D, and the feed-forward two of D x 4D.
    weights = (4 + 2 * MLP_RATIO) * D * D
    blocks = config.num_layers + config.num_single_layers
    return blocks * (2 * weights * tokens + 4 * D * tokens * tokens)
