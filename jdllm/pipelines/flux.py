"""FLUX.1-dev and FLUX.1-schnell (`FluxPipeline`): CLIP and T5, a transformer of two kinds of block.

CLIP makes one vector of a prompt, which modulates the blocks, and T5 the text tokens. Both read
pads, so the ids of a caption are CLIP's, always as many, and then T5's, `max_sequence_length` of
them. What is kept of a caption is what the transformer makes of the vector and of the tokens
whatever the step.

The two models are one class. Dev was distilled from guided forwards and reads the scale of its
guidance as it reads the timestep (`guidance_embeds`); schnell was also distilled to few steps and
has no such scale. Latents are packed (`models/images/packing.py`), as the published pipeline takes
and gives them.

All is as diffusers 0.42.1 computes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jdllm.models.images import flux, step_cache
from jdllm.models.images.clip_text import ClipTextConfig
from jdllm.models.images.flux_config import FluxConfig
from jdllm.pipelines import interface, packed, padded_prompts, prompts, tokenizer_files

# true_cfg_scale 1 asks for nothing: it is an option beside the distilled guidance.
_DEV = interface.Defaults(
    height=1024,
    width=1024,
    num_inference_steps=28,
    guidance_scale=3.5,
    max_sequence_length=512,
    longest_sequence_length=512,
    true_cfg_scale=1.0,
)
_SCHNELL = dataclasses.replace(
    _DEV,
    num_inference_steps=4,
    guidance_scale=None,
    max_sequence_length=256,
    longest_sequence_length=256,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captions:
    """What is kept of captions: text tokens, and CLIP's part of what modulates the blocks."""

    text: Float[Any, "R L D"]
    pooled: Float32[Any, "R D"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FluxPipeline(packed.PackedPipeline):
    """A loaded FLUX.1 without its weights; see `interface.Pipeline`."""

    layout: ClassVar[interface.Layout] = interface.Layout(
        models={
            "text_encoder": ("CLIPTextModel",),
            "text_encoder_2": ("T5EncoderModel",),
            "transformer": ("FluxTransformer2DModel",),
            "vae": ("AutoencoderKL",),
        },
        tokenizers={
            "tokenizer": interface.TokenizerPlace(
                class_names=("CLIPTokenizer", "CLIPTokenizerFast", *interface.ANY_TOKENIZER),
                encoder="text_encoder",
                read=functools.partial(
                    padded_prompts.PaddedTokenizer,
                    pad_token="<|endoftext|>",
                    read_parts=tokenizer_files.clip,
                ),
                stand_in=functools.partial(
                    padded_prompts.PaddedByteTokenizer, offset=0, end_id=-1, pad_id=-1
                ),
            ),
            "tokenizer_2": interface.TokenizerPlace(
                class_names=("T5TokenizerFast", "T5Tokenizer", *interface.ANY_TOKENIZER),
                encoder="text_encoder_2",
                read=functools.partial(padded_prompts.PaddedTokenizer, pad_token="<pad>"),
                stand_in=functools.partial(
                    padded_prompts.PaddedByteTokenizer, offset=3, end_id=1, pad_id=0
                ),
            ),
        },
    )
    options: ClassVar[interface.Options] = interface.Options(
        cfg_switch="true_cfg_scale", has_step_cache=True
    )

    @property
    def defaults(self) -> interface.Defaults:
        return self.parts.defaults(_DEV if self._transformer.guidance_embeds else _SCHNELL)

    @property
    def max_caption_tokens(self) -> int:
        return self.defaults.longest_sequence_length

    @property
    def prefix_tokens(self) -> int:
        """The ids of CLIP."""
        clip: ClipTextConfig = self.parts.configs["text_encoder"]
        return clip.max_positions

    @property
    def pads_captions(self) -> bool:
        return True

    def prompt_tokenizer(
        self, tokenizers: Mapping[str, prompts.PromptTokenizer]
    ) -> prompts.PromptTokenizer:
        return padded_prompts.JoinedTokenizer(
            tokenizers["tokenizer"], tokenizers["tokenizer_2"], first_length=self.prefix_tokens
        )

    def caption_shapes(self, tokens: int) -> Captions:
        dim = self._transformer.dim
        text = jax.ShapeDtypeStruct((tokens - self.prefix_tokens, dim), self.parts.dtype)
        return Captions(text=text, pooled=jax.ShapeDtypeStruct((dim,), jnp.float32))

    def encode(
        self, params: interface.Params, ids: Int32[Array, "R L"], lens: Int32[Array, " R"]
    ) -> Captions:
        of_clip, of_t5 = jnp.split(ids, [self.prefix_tokens], axis=1)
        vector = self.parts.module("text_encoder", params).encode(of_clip)
        embeddings = self.parts.module("text_encoder_2", params).encode(
            of_t5, packed.after_prefix(lens, self.prefix_tokens)
        )
        transformer = self.parts.module("transformer", params)
        return Captions(
            text=transformer.embed_text(embeddings), pooled=transformer.embed_pooled(vector)
        )

    @property
    def modulation(self) -> interface.ModulationAhead:
        return interface.ModulationAhead(
            make=self._modulate,
            shapes=flux.modulation_shapes(self._transformer),
            by_caption=True,
        )

    def predict(
        self,
        params: interface.Params,
        latents: packed.Latents,
        sigma: Float32[Array, " R"],
        captions: Captions,
        lens: Int32[Array, " R"],
        guidance: interface.Guidance,
        size: interface.Size,
        modulation: flux.Modulations | None = None,
        cache: step_cache.StepCache | None = None,
    ) -> packed.Latents:
        del sigma, guidance  # they are in the modulation
        return self.parts.module("transformer", params).denoise(
            latents,
            modulation,
            captions.text,
            packed.after_prefix(lens, self.prefix_tokens),
            self._grid(size),
            cache,
        )

    def guide(
        self,
        positive: packed.Latents,
        negative: packed.Latents,
        sigma: Float32[Array, " R"],
        guidance: interface.Guidance,
    ) -> packed.Latents:
        """Returns negative + s (positive - negative)."""
        del sigma
        return negative + guidance.true_cfg_scale[:, None, None] * (positive - negative)

    def _modulate(
        self,
        params: interface.Params,
        sigma: Float32[Array, " R"],
        captions: Captions,
        guidance: interface.Guidance,
    ) -> flux.Modulations:
        transformer = self.parts.module("transformer", params)
        return transformer.modulate(sigma, guidance.guidance_scale, captions.pooled)

    @property
    def _transformer(self) -> FluxConfig:
        return self.parts.configs["transformer"]
