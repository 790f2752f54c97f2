"""Qwen-Image and Qwen-Image-2512 (`QwenImagePipeline`): Qwen2.5-VL, a transformer of two streams.

A fixed text stands before and after each prompt; the transformer sees neither what is before it nor
that there was something. What is kept of a caption are its text tokens as the blocks take them.
Latents are packed (`models/images/packing.py`), as the published pipeline takes and gives them.

All is as diffusers 0.42.1 computes it for a request alone. (With several prompts and several images
of each, that version gives embeddings the padding of others.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jdllm.models.images import qwen_image, qwen_image_config, step_cache
from jdllm.pipelines import interface, packed, prompts

PREFIX_TOKENS = 34  # what the published tokenizer makes of the text before the prompt
_BEFORE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n"

_DEFAULTS = interface.Defaults(
    height=1024,
    width=1024,
    num_inference_steps=50,
    guidance_scale=None,
    max_sequence_length=512,
    longest_sequence_length=1024,
    true_cfg_scale=4.0,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QwenImagePipeline(packed.PackedPipeline):
    """A loaded Qwen-Image without its weights; see `interface.Pipeline`."""

    layout: ClassVar[interface.Layout] = interface.Layout(
        models={
            "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
            "transformer": ("QwenImageTransformer2DModel",),
            "vae": ("AutoencoderKLQwenImage",),
        },
        tokenizers={
            "tokenizer": interface.TokenizerPlace(
                class_names=interface.QWEN2_TOKENIZERS,
                encoder="text_encoder",
                read=functools.partial(
                    prompts.FramedTokenizer,
                    before=_BEFORE,
                    after=_AFTER,
                    prefix_tokens=PREFIX_TOKENS,
                ),
                stand_in=functools.partial(prompts.ByteTokenizer, prefix_tokens=PREFIX_TOKENS),
            )
        },
    )
    options: ClassVar[interface.Options] = interface.Options(
        cfg_switch="true_cfg_scale", has_step_cache=True
    )

    @property
    def defaults(self) -> interface.Defaults:
        return self.parts.defaults(_DEFAULTS)

    @property
    def max_caption_tokens(self) -> int:
        return self.parts.defaults(_DEFAULTS).longest_sequence_length

    @property
    def prefix_tokens(self) -> int:
        return PREFIX_TOKENS

    @property
    def pads_captions(self) -> bool:
        return False

    def prompt_tokenizer(
        self, tokenizers: Mapping[str, prompts.PromptTokenizer]
    ) -> prompts.PromptTokenizer:
        return tokenizers["tokenizer"]

    def caption_shapes(self, tokens: int) -> jax.ShapeDtypeStruct:
        shape = tokens - PREFIX_TOKENS, self._transformer.dim
        return jax.ShapeDtypeStruct(shape, self.parts.dtype)

    def encode(
        self, params: interface.Params, ids: Int32[Array, "R L"], lens: Int32[Array, " R"]
    ) -> Float[Array, "R L-34 D"]:
        embeddings = self.parts.module("text_encoder", params).encode(ids, lens)
        transformer = self.parts.module("transformer", params)
        return transformer.embed_text(embeddings[:, PREFIX_TOKENS:])

    @property
    def modulation(self) -> interface.ModulationAhead:
        return interface.ModulationAhead(
            make=self._modulate,
            shapes=qwen_image.modulation_shapes(self._transformer),
            by_caption=False,
        )

    def predict(
        self,
        params: interface.Params,
        latents: packed.Latents,
        sigma: Float32[Array, " R"],
        captions: Float[Array, "R L-34 D"],
        lens: Int32[Array, " R"],
        guidance: interface.Guidance,
        size: interface.Size,
        modulation: qwen_image.Modulations | None = None,
        cache: step_cache.StepCache | None = None,
    ) -> packed.Latents:
        del sigma, guidance  # the noise level is in the modulation
        own = packed.after_prefix(lens, PREFIX_TOKENS)
        transformer = self.parts.module("transformer", params)
        return transformer.denoise(latents, modulation, captions, own, self._grid(size), cache)

    def guide(
        self,
        positive: packed.Latents,
        negative: packed.Latents,
        sigma: Float32[Array, " R"],
        guidance: interface.Guidance,
    ) -> packed.Latents:
        """Returns negative + s (positive - negative), each token as long as the positive one's."""
        del sigma
        scale = guidance.true_cfg_scale[:, None, None]
        mixed = negative + scale * (positive - negative)
        # A token that is 0 stays so.
        length = jnp.maximum(_length(mixed), jnp.finfo(jnp.float32).tiny)
        return mixed * (_length(positive) / length)

    def _modulate(
        self,
        params: interface.Params,
        sigma: Float32[Array, " R"],
        captions: interface.Captions,
        guidance: interface.Guidance,
    ) -> qwen_image.Modulations:
        del captions, guidance
        return self.parts.module("transformer", params).modulate(sigma)

    @property
    def _transformer(self) -> qwen_image_config.QwenImageConfig:
        return self.parts.configs["transformer"]


def _length(x: packed.Latents) -> Float32[Array, "R T 1"]:
    return jnp.linalg.norm(x, axis=-1, keepdims=True)
