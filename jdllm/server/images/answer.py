"""The answer to a request for images: one object, or OpenAI's events.

Files are encoded off the event loop. `usage` counts the prompt once, and for each image the tokens
that the transformer computed for it; what OpenAI's objects have no field for (seed, steps, times)
stands beside theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jdllm import version
from jdllm.host import offload
from jdllm.server import sse, state
from jdllm.server.images import encoding, events

if TYPE_CHECKING:
    from jdllm.engine.images import requests
    from jdllm.server.images.request import GenerationRequest

File = TypeVar("File", bytes, str)

BACKGROUND = "opaque"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. `base_url` is the server's address as the client wrote it, with a slash."""

    server: state.ServerState
    body: GenerationRequest
    call: events.Call
    output_format: requests.OutputFormat
    base_url: str
    created_s: int = dataclasses.field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """Returns the object with all images."""
        finals = await events.collect(self.server, self.call)
        data = await asyncio.gather(*map(self._item, finals))
        return {
            "id": self.call.rid,
            "created": self.created_s,
            "model": self.server.served.model_name,
            "background": BACKGROUND,
            "output_format": self.output_format,
            "size": self._size,
            "data": data,
            "usage": self._usage(finals),
            "inference_time_s": max(one.encode_s + one.denoise_s + one.decode_s for one in finals),
            "peak_memory_mb": self.server.images.peak_memory_mb(),
        }

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream."""
        async with contextlib.aclosing(events.stream(self.server, self.call)) as found:
            async for one in found:
                event = await self._event(one)
                yield f"event: {event['type']}\n".encode() + sse.frame(event)

    async def _event(self, event: requests.ImageEvent) -> dict[str, Any]:
        is_final = event.kind == "final"
        content = {
            "type": f"image_generation.{'completed' if is_final else 'partial_image'}",
            "b64_json": await self._encoded(event, encoding.base64_text),
            "background": BACKGROUND,
            "created_at": self.created_s,
            "output_format": self.output_format,
            "quality": "auto",
            "size": self._size,
            "image_index": event.request_index,  # OpenAI's events have none; n may be above 1
        }
        if is_final:
            return content | self._facts(event) | {"usage": self._usage([event])}
        return content | {"partial_image_index": event.partial_index}

    async def _item(self, event: requests.ImageEvent) -> dict[str, Any]:
        """Returns an entry of `data`."""
        if not self.body.is_url:
            picture = {"b64_json": await self._encoded(event, encoding.base64_text)}
        else:
            store = self.server.image_store
            content = await self._encoded(event, bytes)
            image_id = store.put(content, encoding.MEDIA_TYPES[self.output_format])
            picture = {
                "url": f"{self.base_url}v1/images/{image_id}/content",
                "expires_at": int(time.time() + store.lifetime_s),
            }
        # SGLang's servers may write files; this one writes none.
        return picture | {"revised_prompt": None, "file_path": None} | self._facts(event)

    async def _encoded(self, event: requests.ImageEvent, form: Callable[[bytes], File]) -> File:
        """Returns the file of an event's picture in a form; a thread makes both."""
        image = event.image
        assert image is not None, "previews and finished images have a picture"
        metadata = self._metadata(event) if self._has_metadata(event) else {}

        def made() -> File:
            return form(encoding.encode(image, self.output_format, self.body.compression, metadata))

        return await offload.off_loop(image.size, made)

    def _has_metadata(self, event: requests.ImageEvent) -> bool:
        wanted = self.body.embed_image_metadata is not False
        return wanted and self.output_format == "png" and event.kind == "final"

    def _metadata(self, event: requests.ImageEvent) -> dict[str, str]:
        """Returns what makes the image again, under the names of the request's fields."""
        request = self.call.requests[event.request_index]
        found = {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "seed": event.seed,
            "num_inference_steps": event.steps,
            "guidance_scale": request.guidance_scale,
            "true_cfg_scale": request.true_cfg_scale,
            "cfg_truncation": request.cfg_truncation,
            "cfg_normalization": request.cfg_normalization,
            "max_sequence_length": request.max_sequence_length,
            "residual_diff_threshold": request.residual_diff_threshold,
            "model": self.server.served.model_name,
            "Software": f"jdllm {version.__version__}",  # a keyword of the PNG standard
        }
        return {name: str(value) for name, value in found.items() if value is not None}

    def _facts(self, event: requests.ImageEvent) -> dict[str, Any]:
        """Returns what a finished image tells of itself."""
        scale = self.call.requests[event.request_index].true_cfg_scale
        return {
            "seed": event.seed,
            "num_inference_steps": event.steps,
            "num_skipped_steps": event.skipped_steps,
            **({} if scale is None else {"true_cfg_scale": scale}),
            "timings": {
                "queue_s": event.queue_s,
                "encode_s": event.encode_s,
                "denoise_s": event.denoise_s,
                "decode_s": event.decode_s,
            },
        }

    @property
    def _size(self) -> str:
        first = self.call.requests[0]
        return f"{first.width}x{first.height}"

    def _usage(self, finals: Sequence[requests.ImageEvent]) -> dict[str, Any]:
        """Returns OpenAI's `usage` over some images; the prompt counts with the first one."""
        facts = self.server.images.facts
        prompts = [one for one in finals if one.request_index == 0]
        text_tokens = sum(one.prompt_tokens for one in prompts)
        image_tokens = sum(
            facts.image_tokens(*one.image.shape[:2]) for one in finals if one.image is not None
        )
        return {
            "input_tokens": text_tokens,
            "input_tokens_details": {
                "text_tokens": text_tokens,
                "image_tokens": 0,
                "truncated_tokens": sum(one.truncated_tokens for one in prompts),
            },
            "output_tokens": image_tokens,
            "output_tokens_details": {"image_tokens": image_tokens, "text_tokens": 0},
            "total_tokens": text_tokens + image_tokens,
            "num_inference_steps": sum(one.steps for one in finals),
            "num_skipped_steps": sum(one.skipped_steps for one in finals),
        }
