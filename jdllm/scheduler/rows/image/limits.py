"""Which image requests can run at all; checked once, when a request arrives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jdllm import errors
from jdllm.options import image_params
from jdllm.scheduler.request import Request

DEFAULT_MAX_PIXELS = 2048 * 2048


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Bounds of one image, from the pipeline and its options.

    Sides are multiples of `size_multiple` pixels. `latent_shape` (height, width) is the shape of
    initial latents of one image.
    """

    size_multiple: int
    latent_shape: Callable[[int, int], tuple[int, ...]]
    max_pixels: int = DEFAULT_MAX_PIXELS
    max_side: int = 4096
    max_steps: int = 1000

    def check(self, image: image_params.ImageParams) -> None:
        """Raises a `RequestError` that names the field at fault."""
        self._check_size(image)
        steps = image.num_inference_steps
        if not 1 <= steps <= self.max_steps:
            raise errors.RequestError(
                f"num_inference_steps={errors.quote(steps)} must be between 1 and {self.max_steps}",
                param="num_inference_steps",
            )
        most = image_params.MAX_PARTIAL_IMAGES
        if not 0 <= image.partial_images <= most:
            raise errors.RequestError(
                f"partial_images={errors.quote(image.partial_images)} must be between 0 and {most}",
                param="partial_images",
            )
        for name in (
            "guidance_scale",
            "true_cfg_scale",
            "cfg_truncation",
            "cfg_normalization",
            "residual_diff_threshold",
        ):
            if not math.isfinite(value := getattr(image, name)):
                raise errors.RequestError(f"{name}={value} must be a finite number", param=name)
        if image.latents is not None:
            self._check_latents(image, image.latents)

    def _check_size(self, image: image_params.ImageParams) -> None:
        for name, side in (("height", image.height), ("width", image.width)):
            if not 1 <= side <= self.max_side:
                raise errors.RequestError(
                    f"{name}={errors.quote(side)} must be between {self.size_multiple} and "
                    f"{self.max_side}",
                    param=name,
                )
            if side % self.size_multiple:
                raise errors.RequestError(
                    f"{name}={side} must be a multiple of {self.size_multiple}", param=name
                )
        if image.height * image.width > self.max_pixels:
            raise errors.RequestError(
                f"an image of {image.width}x{image.height} has {image.height * image.width} "
                f"pixels, at most {self.max_pixels} are served",
                param="size",
            )

    def _check_latents(self, image: image_params.ImageParams, latents: np.ndarray) -> None:
        shape = self.latent_shape(image.height, image.width)
        if latents.shape != shape or latents.dtype != np.float32:
            raise errors.RequestError(
                f"latents of {image.width}x{image.height} pixels must be float32 of shape "
                f"{shape}, not {latents.dtype} of shape {latents.shape}",
                param="latents",
            )
        if not np.isfinite(latents).all():
            raise errors.RequestError("latents hold NaN or infinite values", param="latents")


def check_captions(
    request: Request,
    image: image_params.ImageParams,
    *,
    guided: tuple[bool, ...],
    cached: tuple[bool, ...],
    max_tokens: int,
    num_entries: int,
) -> None:
    """Raises a `RequestError` for captions, a guidance or a step cache that could not be served.

    `guided` and `cached` say which kinds of steps there are. A request takes one of the
    `num_entries` entries for captions, of at most `max_tokens` tokens, or two.
    """
    if image.is_guided not in guided:
        served = "with" if guided[0] else "without"
        raise errors.RequestError(
            f"guidance_scale={image.guidance_scale}: images are served only {served} guidance",
            param="guidance_scale",
        )
    if (image.residual_diff_threshold > 0) not in cached:
        raise errors.RequestError(
            f"residual_diff_threshold={image.residual_diff_threshold} needs a server that was "
            "started with --enable-step-cache",
            param="residual_diff_threshold",
        )
    if image.is_guided == (image.negative_ids is None):
        raise errors.RequestError(
            "a negative prompt needs guidance, and guidance needs a negative prompt (which may "
            "be empty)",
            param="negative_prompt",
        )
    captions = {"prompt": tuple(request.prompt_ids)}
    if image.negative_ids is not None:
        captions["negative_prompt"] = image.negative_ids
    for name, ids in captions.items():
        if not 1 <= len(ids) <= max_tokens:
            raise errors.RequestError(
                f"the {name} has {len(ids)} tokens; it must have between 1 and {max_tokens}",
                param=name,
            )
    if len(set(captions.values())) > num_entries:
        raise errors.RequestError(
            f"guidance keeps two captions on the device, and there is room for {num_entries}",
            param="guidance_scale",
        )
