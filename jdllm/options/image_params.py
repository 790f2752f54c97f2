"""What one image request asks for, with every default filled in by the engine."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float32

MAX_PARTIAL_IMAGES = 3

Output = Literal["image", "float", "latent"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageParams:
    """Options of one image. `height` and `width` are in pixels.

    `is_guided`: each step is computed for the prompt and for `negative_ids`, the tokens of the
    negative prompt ("" is one, too); None exactly if the image is not guided. The meaning of
    `guidance_scale` is the model's; `true_cfg_scale` weighs the negative prompts of FLUX and
    Qwen-Image, `cfg_truncation` and `cfg_normalization` are options of Z-Image. `partial_images`
    previews are decoded on the way. Above 0, `residual_diff_threshold` lets steps leave out most of
    the transformer (`models/images/step_cache.py`). `latents` are the initial latents, in the
    model's shape; None: they are drawn from the seed. `output`: the decoded image in 8 bits or as
    floats 0 to 1, or its latents.
    """

    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float = 0.0
    true_cfg_scale: float = 1.0
    is_guided: bool = False
    negative_ids: tuple[int, ...] | None = None
    cfg_truncation: float = 1.0
    cfg_normalization: float = 0.0
    residual_diff_threshold: float = 0.0
    partial_images: int = 0
    latents: Float32[np.ndarray, " ..."] | None = None
    output: Output = "image"

    @property
    def preview_steps(self) -> tuple[int, ...]:
        """After which steps, counted from 1, a preview is decoded: evenly spaced, never the last.

        A request of n steps has at most n - 1 previews.
        """
        steps = self.num_inference_steps
        count = min(self.partial_images, steps - 1)
        return tuple(steps * i // (count + 1) for i in range(1, count + 1))
