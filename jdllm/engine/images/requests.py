"""Requests for images: what a caller may ask, what the pipeline says of itself, what comes back.

The server and the offline API know an image engine only as `ImageServing`. `checks.py` fills
defaults in and refuses what cannot be made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol

import numpy as np

from jdllm.engine import serving
from jdllm.options import image_params

OutputFormat = Literal["png", "jpeg", "webp"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """One image to make; None stands for the pipeline's default.

    Names are those of diffusers' pipelines. Sizes are in pixels. `partial_images` is how many
    previews are wanted on the way. `latents` are the initial latents in the pipeline's own layout,
    `ImageFacts.latents_shape`, float32; without them they are drawn from `seed`. `output` is what
    the final event brings.
    """

    prompt: str
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    cfg_truncation: float | None = None
    cfg_normalization: bool | float | None = None
    residual_diff_threshold: float | None = None
    max_sequence_length: int | None = None
    seed: int | None = None
    partial_images: int | None = None
    latents: np.ndarray | None = dataclasses.field(default=None, compare=False)
    output: image_params.Output = "image"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What a loaded pipeline says of itself.

    A default of None says that the pipeline has no such option. `cfg_switch` is the option that
    switches classifier-free guidance on, a second forward with the negative prompt:
    `guidance_scale` above 0 (Z-Image), or `true_cfg_scale` above 1 with a negative prompt (FLUX,
    Qwen-Image); None says that there is no negative prompt at all. `has_cfg_limits` says whether
    `cfg_truncation` and `cfg_normalization` exist, `has_step_cache` whether steps may reuse
    residuals (`residual_diff_threshold`). `compiled_size` is the smallest (height, width) whose
    images need no compilation; None: the default one.
    """

    family: str
    size_multiple: int
    default_height: int
    default_width: int
    max_side: int
    max_pixels: int
    default_steps: int
    max_steps: int
    default_max_sequence_length: int
    max_sequence_length: int
    latent_channels: int
    packs_latents: bool = False
    default_guidance_scale: float | None = None
    default_true_cfg_scale: float | None = None
    cfg_switch: Literal["guidance_scale", "true_cfg_scale"] | None = None
    has_cfg_limits: bool = False
    has_step_cache: bool = False
    default_output_format: OutputFormat = "png"
    compiled_size: tuple[int, int] | None = None

    def image_tokens(self, height: int, width: int) -> int:
        """Returns how many tokens the transformer computes for an image of that size."""
        return (height // self.size_multiple) * (width // self.size_multiple)

    def latents_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Returns [channels, h, w], or [tokens, 4·channels] where 2x2 latents are packed."""
        if self.packs_latents:
            return self.image_tokens(height, width), 4 * self.latent_channels
        multiple = self.size_multiple
        return self.latent_channels, 2 * (height // multiple), 2 * (width // multiple)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageEvent:
    """Something that has happened to one request of a call.

    `kind` "partial" brings a preview, number `partial_index` from 0, and "final" the image: uint8
    [H, W, 3], or what the request's `output` says: "float" is float32 [H, W, 3] from 0 to 1,
    "latent" the final latents, float32 in the layout of the initial ones; previews are always
    uint8. "fault" ends a request that failed alone (NaN, out of memory), "abort" one that somebody
    aborted; both have no image, but a `message`. Every request ends in exactly one event of the
    last three kinds.
    Times are seconds of this request so far: waiting, text encoding, denoising, decoding.
    Of the `steps`, `skipped_steps` left out most of the transformer.
    `prompt_tokens` are those of the prompt that the text encoder saw, `truncated_tokens` those that
    were cut off before, of the negative prompt too.
    """

    request_index: int
    kind: Literal["partial", "final", "fault", "abort"]
    seed: int
    steps: int
    skipped_steps: int = 0
    image: np.ndarray | None = None
    partial_index: int | None = None
    queue_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    truncated_tokens: int = 0
    message: str | None = None


class ImageServing(serving.Serving, Protocol):
    """An engine that makes images."""

    @property
    def output_modality(self) -> Literal["image"]: ...

    @property
    def facts(self) -> ImageFacts: ...

    def stream(
        self, requests: Sequence[ImageRequest], /, *, rid: str, priority: int | None = None
    ) -> AsyncGenerator[ImageEvent, None]:
        """Yields the events of all requests as they come, until each has ended.

        The engine takes all requests or none: a `RequestError` (`QueueFull` and `EngineStopped`
        are such) comes before the first event. A single request is named `rid`, several are
        `rid-0`, `rid-1` and so on, which is what `abort` takes; a name in use is an error at
        `rid`. Closing the iterator ends them. `priority` is checked as `priority_class` does.
        """
        ...

    def peak_memory_mb(self) -> float | None:
        """Returns the most MB (1e6 bytes) that the device has held; None where nothing counts."""
        ...

    def warm_up(self) -> None:
        """Makes one small image, so that the first request is not slower than others."""
        ...


def is_guided(request: ImageRequest, facts: ImageFacts) -> bool:
    """Says whether a resolved request runs with a negative prompt beside its prompt."""
    match facts.cfg_switch:
        case "guidance_scale":
            return (request.guidance_scale or 0.0) > 0.0
        case "true_cfg_scale":
            has_negative = request.negative_prompt is not None
            return has_negative and (request.true_cfg_scale or 0.0) > 1.0
        case None:
            return False
