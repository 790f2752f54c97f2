"""The sizes of a Z-Image transformer: its config.json, and the work of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax

from jdllm import errors
from jdllm.device import sharding
from jdllm.models import hf_config
from jdllm.models.images import diffusers_config, split

PATCH = 2  # latent pixels of a token, in both directions
SEQUENCE_MULTIPLE = 32
_LARGEST_TIMESTEP_EMBEDDING = 256

Tokens = TypeVar("Tokens", int, jax.Array)

# The keys of config.json, with the defaults of the published class.
_DEFAULTS: Mapping[str, Any] = {
    "all_patch_size": [PATCH],
    "all_f_patch_size": [1],
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,  # neutral: the class never reads it, every head has its own keys and values
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": 2560,
    "siglip_feat_dim": None,  # of another model, which sees images too
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1024, 512, 512],
}
_ONLY_DEFAULT = ("all_patch_size", "all_f_patch_size", "qk_norm", "siglip_feat_dim")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZImageConfig(split.SplitConfig):
    """What config.json holds, by its names; `axes_lens` bounds the positions of each axis."""

    in_channels: int
    dim: int
    n_layers: int
    n_refiner_layers: int
    n_heads: int
    norm_eps: float
    cap_feat_dim: int
    rope_theta: float
    t_scale: float
    axes_dims: tuple[int, ...]
    axes_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dim != self.n_heads * sum(self.axes_dims):
            raise errors.ConfigError(
                f"config.json: dim={self.dim} must be n_heads={self.n_heads} heads of "
                f"sum(axes_dims)={sum(self.axes_dims)} dims"
            )
        diffusers_config.check_even("axes_dims", self.axes_dims)

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def heads(self) -> sharding.Heads:
        return sharding.Heads(query=self.n_heads, kv=self.n_heads, dim=self.head_dim)

    @property
    def feed_forward_width(self) -> int:
        return int(self.dim / 3 * 8)

    @property
    def timestep_embedding(self) -> int:
        return min(self.dim, _LARGEST_TIMESTEP_EMBEDDING)

    @property
    def patch_dim(self) -> int:
        return self.in_channels * PATCH * PATCH

    @property
    def num_modulated(self) -> int:
        """How many blocks the timestep modulates: all but those of captions."""
        return self.n_refiner_layers + self.n_layers


def read(hf: Mapping[str, Any]) -> ZImageConfig:
    """Returns the config of a parsed config.json; a missing key has the default of the class.

    Raises a ConfigError that names the key for an unknown key, and for a value that is wrong or
    not implemented.
    """
    values = diffusers_config.values(hf, _DEFAULTS, only_default=_ONLY_DEFAULT)
    return ZImageConfig(
        in_channels=hf_config.integer(values, "in_channels"),
        dim=hf_config.integer(values, "dim"),
        n_layers=hf_config.integer(values, "n_layers", high=hf_config.LARGEST_DEPTH),
        n_refiner_layers=hf_config.integer(
            values, "n_refiner_layers", high=hf_config.LARGEST_DEPTH
        ),
        n_heads=hf_config.integer(values, "n_heads"),
        norm_eps=hf_config.number(values, "norm_eps"),
        cap_feat_dim=hf_config.integer(values, "cap_feat_dim"),
        rope_theta=hf_config.number(values, "rope_theta"),
        t_scale=hf_config.number(values, "t_scale"),
        axes_dims=diffusers_config.axes(values, "axes_dims"),
        axes_lens=diffusers_config.axes(values, "axes_lens"),
    )


def padded(tokens: Tokens) -> Tokens:
    """Returns numbers of tokens with the padding that is part of the model."""
    return -(-tokens // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE


def flops(config: ZImageConfig, image_tokens: int, caption_tokens: int) -> int:
    """Returns the operations of one forward of one row, 2 for a multiply-add.

    Linear layers and attention of the blocks count; the rest is far below one percent.
    """
    D, image, caption = config.dim, padded(image_tokens), padded(caption_tokens)
    weights = 4 * D * D + 3 * D * config.feed_forward_width
    blocks = (
        (config.n_layers, image + caption),
        (config.n_refiner_layers, image),
        (config.n_refiner_layers, caption),
    )
    return sum(n * (2 * weights * rows + 4 * D * rows * rows) for n, rows in blocks)
