"""A computable engine that obeys `jdllm.engine.images.requests.ImageServing`.

A picture is a function of size, seed and steps alone (`painted`), so a test knows every pixel.
Steps come `step_s` apart, all requests of a call together. `open_requests` are the ids of images
whose iterator is open. Some prompts end otherwise (`FAULT`, `CRASH`, `LATE_CRASH`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence

import numpy as np
from support import fake_serving

from jdllm import errors
from jdllm.engine import requests
from jdllm.engine.images.requests import ImageEvent, ImageFacts, ImageRequest
from jdllm.options import config

FACTS = ImageFacts(
    family="fake_image",
    size_multiple=16,
    default_height=64,
    default_width=96,
    max_side=256,
    max_pixels=256 * 192,
    default_steps=4,
    max_steps=50,
    default_max_sequence_length=32,
    max_sequence_length=64,
    latent_channels=16,
    default_guidance_scale=0.0,
    cfg_switch="guidance_scale",
    has_cfg_limits=True,
)
# As FLUX: an embedded guidance scale, classifier-free guidance by another option, packed latents.
FLUX_FACTS = dataclasses.replace(
    FACTS,
    family="fake_flux",
    packs_latents=True,
    default_guidance_scale=3.5,
    default_true_cfg_scale=1.0,
    cfg_switch="true_cfg_scale",
    has_cfg_limits=False,
)
FAULT, CRASH, LATE_CRASH = "a fault", "a crash", "a late crash"
FAULT_TEXT = "the latents are not numbers (NaN)"
PEAK_MEMORY_MB = 12500.0
TIMES = {"queue_s": 0.25, "encode_s": 0.5, "denoise_s": 2.0, "decode_s": 1.0}


def painted(height: int, width: int, seed: int, steps: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    planes = [x + seed, y + 3 * seed, np.full_like(x, 16 * steps)]
    return (np.stack(planes, axis=-1) % 256).astype(np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeStats:
    num_running_reqs: int
    num_queue_reqs: int
    max_running_requests: int
    images_total: int


class FakeImageEngine(fake_serving.FakeServing):
    output_modality = "image"

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        max_queued: int = 100,
        facts: ImageFacts = FACTS,
        engine_config: config.EngineConfig | None = None,
    ):
        super().__init__(max_queued=max_queued, engine_config=engine_config)
        self.facts = facts
        self.model_name = "fake-image"
        self.seen: list[ImageRequest] = []
        self.num_warm_ups = 0
        self._step_s = step_s
        self._images = 0

    async def stream(
        self,
        asked: Sequence[ImageRequest],
        *,
        rid: str,
        priority: int | None = None,
    ) -> AsyncGenerator[ImageEvent, None]:
        if not self._admitting:
            raise errors.EngineStopped("the engine is draining")
        names = [requests.choice_id(rid, len(asked), i) for i in range(len(asked))]
        if self.open_requests & set(names):
            raise errors.RequestError(f"request id {rid!r} is in use", param="rid")
        if len(self.open_requests) + len(asked) > self._max_queued:
            raise errors.QueueFull("The request queue is full.")
        self.seen_priorities.append(requests.priority_class(priority, self.config))
        self.seen += asked
        self.open_requests |= set(names)
        try:
            if asked[0].prompt == CRASH:
                raise RuntimeError("secret detail of a fault")
            running = set(range(len(asked)))
            step = 0
            while running:
                await asyncio.sleep(self._step_s)
                step += 1
                for index in sorted(running):
                    for event in self._events(asked[index], names[index], index, step):
                        if event.kind != "partial":
                            running.discard(index)
                        yield event
                if asked[0].prompt == LATE_CRASH:
                    raise RuntimeError("secret detail of a late fault")
        finally:
            self.open_requests -= set(names)

    def _events(self, request: ImageRequest, name: str, index: int, step: int) -> list[ImageEvent]:
        """Returns what step `step` (from 1) of a request brings: a preview, its end, nothing."""
        words = len(request.prompt.split())
        kept = min(words, request.max_sequence_length)
        event = ImageEvent(
            request_index=index,
            kind="partial",
            seed=request.seed,
            steps=step,
            prompt_tokens=kept,
            truncated_tokens=words - kept,
            **TIMES,
        )
        if name in self._aborted:
            return [dataclasses.replace(event, kind="abort", message="aborted")]
        if request.prompt == FAULT and step == 2:
            return [dataclasses.replace(event, kind="fault", message=FAULT_TEXT)]
        picture = painted(request.height, request.width, request.seed, step)
        if step == request.num_inference_steps:
            self._images += 1
            return [dataclasses.replace(event, kind="final", image=picture)]
        if step <= request.partial_images:
            return [dataclasses.replace(event, image=picture, partial_index=step - 1)]
        return []

    def peak_memory_mb(self) -> float | None:
        return PEAK_MEMORY_MB

    def warm_up(self) -> None:
        self.num_warm_ups += 1

    def stats(self) -> FakeStats:
        return FakeStats(
            num_running_reqs=len(self.open_requests),
            num_queue_reqs=0,
            max_running_requests=8,
            images_total=self._images,
        )
