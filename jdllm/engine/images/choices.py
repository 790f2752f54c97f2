"""From requests for images to requests of the scheduler, and from its events to image events.

The counterpart of `input_processor.py` and `requests.Choice` for pipelines. Prompts are tokenised
here, on the caller's side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jdllm import errors
from jdllm.engine import requests
from jdllm.engine.images import checks
from jdllm.engine.images.requests import ImageEvent, ImageFacts, ImageRequest
from jdllm.engine.loop import Event, FaultEvent
from jdllm.options import image_params, sampling_params
from jdllm.pipelines import prompts
from jdllm.scheduler.request import Request

# An image is more work than its prompt, but not for the thread that tokenises.
SIZE_OF_AN_IMAGE = 64


class ImageChoice:
    """One image on the caller's side: turns the events of its request into image events."""

    def __init__(
        self,
        request: Request,
        asked: ImageRequest,
        index: int,
        num_cut: int,
    ):
        self.request = request
        self.has_ended = False
        self._asked = asked
        self._index = index
        self._num_cut = num_cut
        self._num_previews = 0

    def update(self, event: Event) -> ImageEvent:
        """Returns what an event of the engine means for the image."""
        seed = self._asked.seed
        assert seed is not None, "a resolved request has a seed"
        told = functools.partial(
            ImageEvent,
            request_index=self._index,
            seed=seed,
            prompt_tokens=len(self.request.prompt_ids),
            truncated_tokens=self._num_cut,
        )
        if isinstance(event, FaultEvent):
            self.has_ended = True
            return told(kind="fault", steps=0, message=event.message)
        commit, times = event.commit, _times(self.request, event.at_s)
        if commit.finish is None:
            (frame,) = commit.frames
            place, self._num_previews = self._num_previews, self._num_previews + 1
            return told(
                kind="partial", steps=frame.step, image=frame.value, partial_index=place, **times
            )
        self.has_ended = True
        image = self.request.image
        assert image is not None, "an image request"
        if commit.finish.kind == "abort":
            message = commit.finish.message
            kind = "abort" if message is None else "fault"
            return told(kind=kind, steps=commit.nfe, message=message or "aborted", **times)
        return told(
            kind="final",
            steps=image.num_inference_steps,
            skipped_steps=commit.num_skipped,
            image=commit.product,
            **times,
        )


def _times(request: Request, at_s: float) -> dict[str, Any]:
    """Returns the seconds of each part of a request until `at_s`; parts that have not begun are 0.

    A preview is decoded while its row waits, so it counts as denoising.
    """
    marks = [request.arrival_s]
    for mark in (request.first_scheduled_s, request.began_s, request.denoised_s):
        marks.append(at_s if mark is None else max(marks[-1], min(mark, at_s)))
    marks.append(at_s)
    names = ("queue_s", "encode_s", "denoise_s", "decode_s")
    return {name: end - begin for name, begin, end in zip(names, marks, marks[1:], strict=False)}


class ImageInputs:
    """Makes choices of requests for images, with one tokenizer for all of their texts."""

    def __init__(self, tokenizer: prompts.PromptTokenizer, facts: ImageFacts):
        self._tokenizer = tokenizer
        self._facts = facts

    def choices(
        self, asked: Sequence[ImageRequest], rid: str, priority_class: float
    ) -> dict[str, ImageChoice]:
        """Returns the choices of a call by their ids, or raises a RequestError with its field."""
        encode = functools.cache(self._encode)  # n images of a prompt are tokenised once
        group = object()
        made: dict[str, ImageChoice] = {}
        for index, one in enumerate(asked):
            one = checks.resolve(one, self._facts)
            name = requests.choice_id(rid, len(asked), index)
            tokens = one.max_sequence_length
            assert tokens is not None and one.seed is not None, "resolved"
            prompt = encode("prompt", one.prompt, tokens)
            negative = None
            if one.negative_prompt is not None:
                negative = encode("negative_prompt", one.negative_prompt, tokens)
            request = Request(
                request_id=name,
                prompt_ids=list(prompt.ids),
                sampling=sampling_params.SamplingParams(),
                max_new_tokens=1,
                seed=one.seed,
                image=_params(one, None if negative is None else negative.ids),
                group=group,
                priority_class=priority_class,
            )
            num_cut = prompt.num_cut + (0 if negative is None else negative.num_cut)
            made[name] = ImageChoice(request, one, index, num_cut)
        return made

    def _encode(self, param: str, text: str, tokens: int) -> prompts.PromptIds:
        try:
            return self._tokenizer.encode(text, max_sequence_length=tokens)
        except errors.RequestError as error:
            if error.param == "prompt":
                message = str(error).replace("prompt", param, 1)
                raise errors.RequestError(message, param=param) from error
            raise


def size(asked: Sequence[ImageRequest]) -> int:
    """Returns how much work the choices of requests are, in characters (`offload`)."""
    return sum(len(one.prompt) + len(one.negative_prompt or "") + SIZE_OF_AN_IMAGE for one in asked)


def _params(one: ImageRequest, negative_ids: tuple[int, ...] | None) -> image_params.ImageParams:
    """Returns the options of a resolved request; `negative_ids` exactly if it is guided."""
    assert one.height is not None and one.width is not None, "resolved"
    assert one.num_inference_steps is not None and one.partial_images is not None, "resolved"
    normalization = one.cfg_normalization
    assert not isinstance(normalization, bool), "resolved to a number"
    optional = {
        "guidance_scale": one.guidance_scale,
        "true_cfg_scale": one.true_cfg_scale,
        "cfg_truncation": one.cfg_truncation,
        "cfg_normalization": normalization,
        "residual_diff_threshold": one.residual_diff_threshold,
    }
    made = image_params.ImageParams(
        height=one.height,
        width=one.width,
        num_inference_steps=one.num_inference_steps,
        is_guided=negative_ids is not None,
        negative_ids=negative_ids,
        partial_images=one.partial_images,
        latents=one.latents,
        output=one.output,
    )
    given = {name: value for name, value in optional.items() if value is not None}
    return dataclasses.replace(made, **given)
