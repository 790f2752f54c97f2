"""What has been planned for a running image request, and what is due for it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jdllm.options import image_params
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows.image import buckets, captions


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ImageStay(captions.CaptionStay):
    """What has been planned for a row; `num_done` counts the steps whose results are known,
    and `num_skipped` those of them that left out most of the transformer.

    `previews` are the steps after which a preview is still to be decoded. `turn` numbers the step
    launches: the row's last one, or the last one when the row was admitted. `window` is the first
    step of those whose modulation has been planned last; None: of none, or steps make their own.
    """

    previews: tuple[int, ...]
    turn: int
    has_begun: bool
    num_planned: int = 0
    num_done: int = 0
    num_skipped: int = 0
    is_decoded: bool = False
    window: int | None = None

    @property
    def is_preview_due(self) -> bool:
        """Whether the next step would overwrite a prediction that is still to be decoded."""
        return bool(self.previews) and self.num_planned == self.previews[0]


def stay_of(request: Request) -> ImageStay:
    """Returns the stay of a running image request."""
    stay = request.held
    assert isinstance(stay, ImageStay)
    return stay


def image_of(request: Request) -> image_params.ImageParams:
    """Returns the options of an image request."""
    assert request.image is not None, "checked when the request arrived"
    return request.image


def captions_of(request: Request) -> list[tuple[int, ...]]:
    """Returns the ids of a request's caption and, if it is guided, of the negative one."""
    negative_ids = image_of(request).negative_ids
    ids = tuple(request.prompt_ids)
    return [ids] if negative_ids is None else [ids, negative_ids]


class Group(NamedTuple):
    """What rows of a step have in common; see `image_buckets.StepBucket`."""

    height: int
    width: int
    is_guided: bool
    is_cached: bool


def group_of(request: Request) -> Group:
    """Returns the group whose steps a request takes."""
    image = image_of(request)
    is_cached = image.residual_diff_threshold > 0
    return Group(image.height, image.width, image.is_guided, is_cached)


def is_final_due(request: Request) -> bool:
    """Returns whether all steps have been planned, but not the decoding of their result."""
    stay = stay_of(request)
    return stay.num_planned == image_of(request).num_inference_steps and not stay.is_decoded


def is_output_due(request: Request) -> bool:
    """Returns whether a preview or the result is to be decoded."""
    return stay_of(request).is_preview_due or is_final_due(request)


def output_of(request: Request) -> buckets.DecodeBucket:
    """Returns the shape, for one row, of the output that is due; previews are always images."""
    image = image_of(request)
    output = image.output if is_final_due(request) else "image"
    return buckets.DecodeBucket(rows=1, height=image.height, width=image.width, output=output)
