"""What pipelines with packed latents share (`models/images/packing.py`): FLUX.1 and Qwen-Image.

Latents are [tokens, channels], a token for each patch; captions have any length, after a prefix.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jdllm.models.images import packing
from jdllm.pipelines import flow_schedule, interface

Latents = Float32[Array, "R T C"]

# That of the other pipelines; there are positions for more.
_MAX_SIDE = 8192


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedPipeline:
    """The geometry of such a pipeline; see `interface.Pipeline`."""

    parts: interface.Parts

    @classmethod
    def build(cls, parts: interface.Parts) -> Self:
        return cls(parts=parts)

    @property
    def size_multiple(self) -> int:
        return self.parts.configs["vae"].scale * packing.PATCH

    @property
    def max_side(self) -> int:
        return _MAX_SIDE

    @property
    def caption_multiple(self) -> int:
        return 1

    @property
    def transformer_width(self) -> int:
        return self.parts.configs["transformer"].dim

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self.image_tokens(height, width), self.parts.configs["transformer"].in_channels

    def image_tokens(self, height: int, width: int) -> int:
        rows, columns = self._grid((height, width))
        return rows * columns

    def sigmas(self, num_steps: int, height: int, width: int) -> np.ndarray:
        tokens = self.image_tokens(height, width)
        return flow_schedule.sigmas_of(self.parts.schedule, num_steps, tokens)

    def decode(
        self, params: interface.Params, latents: Latents, size: interface.Size
    ) -> Float32[Array, "R H W 3"]:
        unpacked = packing.unpack(latents, self._grid(size))
        return self.parts.module("vae", params).decode(unpacked)

    def _grid(self, size: interface.Size) -> tuple[int, int]:
        """Returns how many rows and columns of tokens an image has."""
        height, width = size
        return height // self.size_multiple, width // self.size_multiple


def after_prefix(lens: Int32[Array, " R"], prefix_tokens: int) -> Int32[Array, " R"]:
    """Returns how many ids stand after the prefix, at least 1.

    Padding rows have captions that end within the prefix.
    """
    return jnp.maximum(lens - prefix_tokens, 1)
