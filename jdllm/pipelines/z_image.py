"""Z-Image and Z-Image-Turbo (`ZImagePipeline`): Qwen3, a transformer of one stream, Flux's decoder.

The caption blocks of the transformer see neither timestep nor image. So what is kept of a caption
is their result, and they run once for each prompt.

All is as diffusers 0.42.1 computes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jdllm.models.images import step_cache, z_image_config
from jdllm.models.images.autoencoder.config import AutoencoderConfig
from jdllm.pipelines import flow_schedule, interface, prompts

Latents = Float32[Array, "R C h w"]

_DEFAULTS = interface.Defaults(
    height=1024,
    width=1024,
    num_inference_steps=8,
    guidance_scale=0.0,
    max_sequence_length=512,
    longest_sequence_length=512,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZImagePipeline:
    """A loaded Z-Image without its weights; see `interface.Pipeline`."""

    layout: ClassVar[interface.Layout] = interface.Layout(
        models={
            "text_encoder": ("Qwen3Model", "Qwen3ForCausalLM"),
            "transformer": ("ZImageTransformer2DModel",),
            "vae": ("AutoencoderKL",),
        },
        tokenizers={
            "tokenizer": interface.TokenizerPlace(
                class_names=interface.QWEN2_TOKENIZERS,
                encoder="text_encoder",
            )
        },
    )
    options: ClassVar[interface.Options] = interface.Options(
        cfg_switch="guidance_scale", has_cfg_limits=True, has_step_cache=True
    )

    parts: interface.Parts

    @classmethod
    def build(cls, parts: interface.Parts) -> Self:
        return cls(parts=parts)

    @property
    def defaults(self) -> interface.Defaults:
        return self.parts.defaults(_DEFAULTS)

    @property
    def size_multiple(self) -> int:
        return self._vae.scale * z_image_config.PATCH

    @property
    def max_side(self) -> int:
        return min(self._transformer.axes_lens[1:]) * self.size_multiple

    @property
    def caption_multiple(self) -> int:
        return z_image_config.SEQUENCE_MULTIPLE

    @property
    def max_caption_tokens(self) -> int:
        # The image stands at the position after the caption, whose first is 1.
        positions = self._transformer.axes_lens[0] - 2
        return positions // self.caption_multiple * self.caption_multiple

    @property
    def prefix_tokens(self) -> int:
        return 0

    @property
    def pads_captions(self) -> bool:
        return False

    def prompt_tokenizer(
        self, tokenizers: Mapping[str, prompts.PromptTokenizer]
    ) -> prompts.PromptTokenizer:
        return tokenizers["tokenizer"]

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        scale = self._vae.scale
        return self._transformer.in_channels, height // scale, width // scale

    def image_tokens(self, height: int, width: int) -> int:
        return (height // self.size_multiple) * (width // self.size_multiple)

    @property
    def transformer_width(self) -> int:
        return self._transformer.dim

    def sigmas(self, num_steps: int, height: int, width: int) -> np.ndarray:
        tokens = self.image_tokens(height, width)
        return flow_schedule.sigmas_of(self.parts.schedule, num_steps, tokens)

    def caption_shapes(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, self._transformer.dim), self.parts.dtype)

    def encode(
        self, params: interface.Params, ids: Int32[Array, "R L"], lens: Int32[Array, " R"]
    ) -> Float[Array, "R L D"]:
        embeddings = self.parts.module("text_encoder", params).encode(ids, lens)
        return self.parts.module("transformer", params).refine_captions(embeddings, lens)

    @property
    def modulation(self) -> None:
        """Nothing: in each step 0.25 of 12.3 GB of weights make it, which is 0.06 of 20 ms."""
        return

    def predict(
        self,
        params: interface.Params,
        latents: Latents,
        sigma: Float32[Array, " R"],
        captions: Float[Array, "R L D"],
        lens: Int32[Array, " R"],
        guidance: interface.Guidance,
        size: interface.Size,
        modulation: None = None,
        cache: step_cache.StepCache | None = None,
    ) -> Latents:
        del guidance, size, modulation
        transformer = self.parts.module("transformer", params)
        return -transformer.denoise(latents, 1 - sigma, captions, lens, cache)

    def guide(
        self,
        positive: Latents,
        negative: Latents,
        sigma: Float32[Array, " R"],
        guidance: interface.Guidance,
    ) -> Latents:
        """Returns positive + g (positive - negative), not longer than c times the positive one.

        c = `cfg_normalization` bounds nothing if it is 0. A `cfg_truncation` up to 1 ends the
        guidance: steps with 1 - sigma above it have none.
        """
        mixed = positive + _per_row(guidance.guidance_scale) * (positive - negative)
        most, length = guidance.cfg_normalization * _length(positive), _length(mixed)
        is_too_long = (guidance.cfg_normalization > 0) & (length > most)
        mixed = mixed * _per_row(jnp.where(is_too_long, most / length, 1))
        truncation = guidance.cfg_truncation
        is_on = (truncation > 1) | (1 - sigma <= truncation)
        return jnp.where(_per_row(is_on), mixed, positive)

    def decode(
        self, params: interface.Params, latents: Latents, size: interface.Size
    ) -> Float32[Array, "R H W 3"]:
        del size
        return self.parts.module("vae", params).decode(latents)

    @property
    def _transformer(self) -> z_image_config.ZImageConfig:
        return self.parts.configs["transformer"]

    @property
    def _vae(self) -> AutoencoderConfig:
        return self.parts.configs["vae"]


def _length(x: Latents) -> Float32[Array, " R"]:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2, 3)))


def _per_row(x: Any) -> Any:
    return x[:, None, None, None]
