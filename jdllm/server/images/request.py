"""The body of POST /v1/images/generations: OpenAI's fields, SGLang's, and none that is ignored.

Options of the pipeline have the names of diffusers. They may stand beside the others, as in
SGLang, or in `diffusers_kwargs`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast, get_args

import pydantic
from pydantic import StrictBool, StrictFloat, StrictStr

from jdllm import errors, value_checks
from jdllm.engine.images import checks
from jdllm.engine.images.requests import ImageFacts, ImageRequest, OutputFormat
from jdllm.foreign import fields
from jdllm.server.edge import bodies, request_model
from jdllm.server.images import encoding, events

MAX_IMAGES = 10  # OpenAI's
RESPONSE_FORMATS = ("b64_json", "url")
OUTPUT_FORMATS = (*get_args(OutputFormat), "jpg")

# What `image_requests.ImageRequest` and the body have under the same name.
OPTIONS = (
    "negative_prompt",
    "height",
    "width",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "cfg_truncation",
    "cfg_normalization",
    "residual_diff_threshold",
    "max_sequence_length",
)
FOREIGN: fields.Neutral = {
    **dict.fromkeys(
        (
            "complexity", "enable_teacache", "enable_upscaling", "extra_body", "flow_shift", "fps",
            "frame_count", "frame_duration_ms", "guidance_rescale", "guidance_scale_2", "image",
            "image_url", "input_image", "latents", "loras", "mask", "messages",
            "negative_prompt_2", "output_path", "perf_dump_path", "profile", "progressive_delta",
            "progressive_levels", "progressive_mode", "prompt_2", "prompt_rewriter",
            "reference_images", "sampler", "scheduler", "stream_options", "svg",
            "upscaling_model_path",
        ),
        (),
    ),
    "background": ("auto", "opaque"),
    "generator_device": ("cuda",),  # SGLang's default
    "moderation": ("auto", "low"),
    "num_frames": (1,),
    "num_images_per_prompt": (1,),
    "num_outputs_per_prompt": (1,),
    "output_quality": ("default",),
    "quality": ("auto", "standard"),
    "style": ("vivid",),  # the default of OpenAI and SGLang
    "upscaling_scale": (4,),
}  # fmt: skip


class PipelineOptions(request_model.RequestModel):
    """Options that diffusers' pipelines have, too."""

    meant_when_empty: ClassVar = frozenset({"negative_prompt"})
    negative_prompt: StrictStr | None = None
    width: request_model.Integer | None = None
    height: request_model.Integer | None = None
    num_inference_steps: request_model.Integer | None = None
    guidance_scale: StrictFloat | None = None
    true_cfg_scale: StrictFloat | None = None
    cfg_truncation: StrictFloat | None = None
    cfg_normalization: Any = None  # a flag or a number
    residual_diff_threshold: StrictFloat | None = None
    max_sequence_length: request_model.Integer | None = None


class DiffusersOptions(PipelineOptions):
    places: ClassVar = {"{} beside diffusers_kwargs": ("n", "seed", "size", "output_format")}
    foreign: ClassVar = {
        **dict.fromkeys(
            (
                "callback_on_step_end", "generator", "latents", "negative_prompt_2", "prompt_2",
                "sigmas",
            ),
            (),
        ),
        "num_images_per_prompt": (1,),
        "output_type": ("pil",),
        "return_dict": (True,),
    }  # fmt: skip


class GenerationRequest(PipelineOptions):
    """What a client asks for."""

    foreign: ClassVar = FOREIGN
    prompt: StrictStr
    model: StrictStr | None = None
    n: request_model.Integer | None = None
    size: StrictStr | None = None
    seed: Any = None
    response_format: StrictStr | None = None
    output_format: StrictStr | None = None
    output_compression: request_model.Integer | None = None
    embed_image_metadata: StrictBool | None = None
    stream: StrictBool | None = None
    partial_images: request_model.Integer | None = None
    diffusers_kwargs: DiffusersOptions | None = None
    rid: StrictStr | None = None
    priority: request_model.Integer | None = None
    _field_names: dict[str, str] = pydantic.PrivateAttr(default_factory=dict)

    @property
    def num_images(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def is_url(self) -> bool:
        """Whether the answer holds URLs instead of images."""
        return self.response_format == "url"

    @property
    def compression(self) -> int:
        """The encoder's quality for JPEG and WebP."""
        given = self.output_compression
        return encoding.DEFAULT_COMPRESSION if given is None else given

    @property
    def field_names(self) -> dict[str, str]:
        """The names that the engine's fields have in this body, where they differ."""
        return self._field_names

    def file_format(self, facts: ImageFacts) -> OutputFormat:
        """Returns the format of the files; checks the options that not every format has."""
        given = self.output_format or facts.default_output_format
        found = cast(OutputFormat, "jpeg" if given == "jpg" else given)
        if found == "png" and self.output_compression not in (None, encoding.DEFAULT_COMPRESSION):
            raise errors.RequestError(
                "output_compression needs output_format jpeg or webp: a PNG is lossless",
                param="output_compression",
            )
        if found != "png" and self.embed_image_metadata:
            raise errors.RequestError(
                "embed_image_metadata needs output_format png", param="embed_image_metadata"
            )
        return found

    def image_requests(self, facts: ImageFacts) -> list[ImageRequest]:
        """Returns one resolved request for each image; errors use the names of this body."""
        first = ImageRequest(
            prompt=self.prompt,
            partial_images=self.partial_images,
            **{name: getattr(self, name) for name in OPTIONS},
        )
        try:
            seeds = checks.seeds(self.seed, self.num_images)
            first = checks.resolve(dataclasses.replace(first, seed=seeds[0]), facts)
        except errors.RequestError as error:
            raise events.renamed(error, self.field_names) from error
        return [dataclasses.replace(first, seed=seed) for seed in seeds]

    @pydantic.model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        value_checks.check_integer(self.num_images, "n", low=1, high=MAX_IMAGES)
        if self.response_format is not None:
            value_checks.check_word(self.response_format, "response_format", words=RESPONSE_FORMATS)
        if self.output_format is not None:
            value_checks.check_word(self.output_format, "output_format", words=OUTPUT_FORMATS)
        value_checks.check_integer(self.compression, "output_compression", low=0, high=100)
        if self.rid is not None:
            bodies.check_rid(self.rid)
        self._check_stream()
        self._take_diffusers_options()
        self._take_size()
        return self

    def _check_stream(self) -> None:
        if self.stream and self.is_url:
            raise errors.RequestError(
                "response_format=url is not possible with stream=true: events hold the images; "
                "leave one of them out",
                param="response_format",
            )
        if self.partial_images and not self.stream:
            raise errors.RequestError("partial_images needs stream=true", param="partial_images")

    def _take_diffusers_options(self) -> None:
        for name in OPTIONS:
            inner = None if self.diffusers_kwargs is None else getattr(self.diffusers_kwargs, name)
            if inner is not None:
                self._take(name, inner, f"diffusers_kwargs.{name}")

    def _take_size(self) -> None:
        found = None if self.size is None else checks.size_of(self.size)
        if found is not None:
            for name, value in zip(("width", "height"), found, strict=True):
                self._take(name, value, "size")

    def _take(self, name: str, value: Any, source: str) -> None:
        """Gives a field the value that it has under another name, unless the two disagree."""
        own = getattr(self, name)
        if own is not None and own != value:
            raise errors.RequestError(f"{source} and {name} disagree; give one", param=source)
        if own is None:
            setattr(self, name, value)
            self._field_names[name] = source
