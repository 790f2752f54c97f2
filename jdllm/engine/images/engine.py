"""The engine for image pipelines: `generate` in a notebook, `stream` under the server.

The counterpart of `engine.py`: the same thread, loop and streams, with requests for images.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

from jdllm import errors
from jdllm.device import devices
from jdllm.engine import control, requests, streams
from jdllm.engine.images import calls, info
from jdllm.engine.images import choices as image_choices
from jdllm.engine.images.choices import ImageInputs
from jdllm.engine.images.requests import ImageEvent, ImageRequest
from jdllm.engine.start import startup
from jdllm.engine.start.images import options as image_options
from jdllm.foreign import names
from jdllm.host import progress
from jdllm.options.config import EngineConfig

WARM_UP_PROMPT = "Hello"


class ImageEngine(control.EngineControl):
    """Serves one image pipeline; keyword arguments are the fields of `EngineConfig`.

    Use it as a context manager, or call `shutdown`; an engine that nobody refers to is shut down by
    the garbage collector.
    """

    output_modality: Literal["image"] = "image"

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: startup.StartupProgress | None = None,
        **options: Any,
    ):
        self.progress = progress or startup.StartupProgress()
        self.config, self._built = control.built(
            image_options.build, config, options, self.progress
        )
        self.device = self._built.device
        self.facts = image_options.facts(self._built)
        self.model_name = self.config.served_model_name or ""  # `resolved` gives it a value
        self.model_dir = self._built.folder.path
        self.max_running_requests = self._built.num_slots
        sizes = self._built.buckets.step_sizes(*self._built.default_size, is_guided=False)
        self.images_per_step = sizes[-1]  # at most, of the default size
        tokenizer = self._built.pipeline.prompt_tokenizer(self._built.folder.tokenizers)
        self._inputs = ImageInputs(tokenizer, self.facts)
        super().__init__(self._built.core, self._built.release)
        self.progress.enter("ready")

    @names.explained()
    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        width: calls.OneOrEach[int] = None,
        height: calls.OneOrEach[int] = None,
        num_inference_steps: calls.OneOrEach[int] = None,
        guidance_scale: calls.OneOrEach[float] = None,
        negative_prompt: calls.OneOrEach[str] = None,
        num_images_per_prompt: int = 1,
        seed: int | Sequence[int] | None = None,
        latents: Any = None,
        output_type: calls.OutputType = "pil",
        true_cfg_scale: calls.OneOrEach[float] = None,
        max_sequence_length: calls.OneOrEach[int] = None,
        cfg_truncation: calls.OneOrEach[float] = None,
        cfg_normalization: calls.OneOrEach[bool | float] = None,
        residual_diff_threshold: calls.OneOrEach[float] = None,
        use_tqdm: bool = True,
    ) -> list[Image.Image] | np.ndarray | list[np.ndarray]:
        """Returns the images of one prompt or of several, in their order: `[image, ...]` for one.

        Options have the names of diffusers' pipelines; each is one value or a list with one for
        each prompt, and None is the pipeline's default. An integer `seed` is that of the first
        image, image i has `seed` + i; a list has one for each image, and -1 is a random one.
        `latents` are the initial latents of all images, [B, C, h, w], or a list with [C, h, w] or
        None for each of them.
        `output_type` "pil" gives a list of PIL images, "np" float32 [B, H, W, 3] from 0 to 1,
        "latent" the final latents, float32 [B, C, h, w]; where sizes differ, the last two give a
        list of arrays. The `info` of a PIL image has its seed, its number of steps, how many of
        them left out most of the transformer, and how many tokens of its prompts were cut off.

        Raises a RequestError with the name of a wrong option, and EngineFault for an image that
        could not be made.
        """
        asked = calls.asked(
            prompts,
            self.facts,
            num_images=num_images_per_prompt,
            seed=seed,
            latents=latents,
            output_type=output_type,
            options={
                "width": width,
                "height": height,
                "num_inference_steps": num_inference_steps,
                "guidance_scale": guidance_scale,
                "negative_prompt": negative_prompt,
                "true_cfg_scale": true_cfg_scale,
                "max_sequence_length": max_sequence_length,
                "cfg_truncation": cfg_truncation,
                "cfg_normalization": cfg_normalization,
                "residual_diff_threshold": residual_diff_threshold,
            },
        )
        return calls.joined(self._run(asked, use_tqdm=use_tqdm), output_type)

    def stream(
        self,
        asked: Sequence[ImageRequest],
        /,
        *,
        rid: str,
        priority: int | None = None,
    ) -> AsyncGenerator[ImageEvent, None]:
        """Yields the events of all requests as they come; see `ImageServing.stream`.

        If there are more requests than can run and wait, this call raises. If one is refused, the
        first step of the iterator raises.
        """
        assert self.config.max_queued_requests is not None, "`resolved` gives it a value"
        priority_class = requests.priority_class(priority, self.config)
        places = self.max_running_requests + self.config.max_queued_requests
        self._check_places(len(asked), places, errors.described_choices(len(asked), 1), "n")
        build = functools.partial(self._inputs.choices, asked, rid, priority_class)
        size = image_choices.size(asked)
        return streams.async_stream(self._loop, build, size=size, is_bounded=True)

    def warm_up(self) -> None:
        """Makes an image of the smallest compiled size in one step."""
        height, width = self.facts.compiled_size or (None, None)
        self.generate(
            WARM_UP_PROMPT, height=height, width=width, num_inference_steps=1, seed=0,
            use_tqdm=False,
        )  # fmt: skip

    def peak_memory_mb(self) -> float | None:
        """Returns the most MB (1e6 bytes) that JAX has held on the device; None on a CPU."""
        peak = devices.peak_memory(self.config.tp_size)
        return None if peak is None else peak / 1e6

    def stats(self) -> info.ImageStats:
        """Returns a snapshot; approximate while a launch is in flight."""
        return info.stats(self._built)

    def server_info(self) -> dict[str, Any]:
        """Returns resolved options, facts of the pipeline, kernels, device and numbers."""
        return info.server_info(self._built, self.config, self.facts)

    def model_info(self) -> dict[str, Any]:
        """Returns what SGLang's `/model_info` returns."""
        return info.model_info(self._built, self.config, self.facts)

    def _run(self, asked: Sequence[ImageRequest], *, use_tqdm: bool) -> list[ImageEvent]:
        """Returns the last events of requests, in their order; the first that fails ends all."""
        choices = self._inputs.choices(asked, requests.new_id(), priority_class=0)
        stream = streams.ChoiceStream(self._loop, choices, lambda event: event)
        finals: dict[int, ImageEvent] = {}
        bar = progress.bar(total=len(asked), desc="Images", unit="image", is_shown=use_tqdm)
        with contextlib.closing(stream) as events, bar:
            for event in events:
                if event.kind != "final":
                    _raise_end(event)
                    continue
                finals[event.request_index] = event
                bar.update()
        return [finals[index] for index in range(len(asked))]


def _raise_end(event: ImageEvent) -> None:
    """Raises for an image that ended without a picture."""
    if event.kind == "fault":
        raise requests.EngineFault(f"image {event.request_index}: {event.message}")
    if event.kind == "abort":
        raise errors.RequestError(
            f"image {event.request_index} was aborted before it was done", code="aborted"
        )
