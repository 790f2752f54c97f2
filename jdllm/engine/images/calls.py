"""Calls of `ImageEngine.generate`: one value or a list for each option, and images in the end.

Names, layouts and output types are those of diffusers' pipelines.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from PIL import Image

from jdllm import errors, value_checks
from jdllm.engine.images import checks, requests
from jdllm.options import image_params

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
OneOrEach: TypeAlias = Value | Sequence[Value | None] | None
OutputType = Literal["pil", "np", "latent"]
_OUTPUTS: Mapping[str, image_params.Output] = {"pil": "image", "np": "float", "latent": "latent"}
MOST_IMAGES_PER_PROMPT = 10_000  # a typing error, beyond


def asked(
    prompts: str | Sequence[str],
    facts: requests.ImageFacts,
    *,
    num_images: int,
    seed: int | Sequence[int] | None,
    latents: Any,
    output_type: str,
    options: Mapping[str, Any],
) -> list[requests.ImageRequest]:
    """Returns one resolved request for each image: all of the first prompt, then of the next.

    Raises a RequestError that names the option at fault.
    """
    value_checks.check_word(output_type, "output_type", words=get_args(OutputType))
    num_images = _plain(num_images)
    value_checks.check_integer(
        num_images, "num_images_per_prompt", low=1, high=MOST_IMAGES_PER_PROMPT
    )
    texts = [prompts] if isinstance(prompts, str) else _listed(prompts, "prompts")
    if not texts:
        raise errors.RequestError("prompts must not be empty", param="prompts")
    each = {name: _each(value, name, len(texts)) for name, value in options.items()}
    count = len(texts) * num_images
    seeds = checks.seeds(_plain(seed), count)
    given = _latents(latents, count)
    made = []
    for place in range(count):
        prompt = place // num_images
        made.append(
            checks.resolve(
                requests.ImageRequest(
                    prompt=texts[prompt],
                    seed=seeds[place],
                    latents=given[place],
                    output=_OUTPUTS[output_type],
                    **{name: values[prompt] for name, values in each.items()},
                ),
                facts,
            )
        )
    return made


def joined(
    finals: Sequence[requests.ImageEvent], output_type: str
) -> list[Image.Image] | np.ndarray | list[np.ndarray]:
    """Returns what images ended with in the form of an output type.

    The `info` of a PIL image says what the server's answers say. Tokens that were cut off are a
    warning, too: other types have no place for them.
    """
    if cut := [one.truncated_tokens for one in finals if one.truncated_tokens]:
        logger.warning(
            "prompts of %d of %d images are long: up to %d tokens of prompt and negative prompt, "
            "beyond max_sequence_length, were cut off", len(cut), len(finals), max(cut),
        )  # fmt: skip
    products = [_product(one) for one in finals]
    if output_type == "pil":
        images = [Image.fromarray(product) for product in products]
        for image, one in zip(images, finals, strict=True):
            image.info |= {
                "seed": one.seed,
                "num_inference_steps": one.steps,
                "num_skipped_steps": one.skipped_steps,
                "truncated_tokens": one.truncated_tokens,
            }
        return images
    if len({product.shape for product in products}) == 1:
        return np.stack(products)
    return list(products)


def _product(event: requests.ImageEvent) -> np.ndarray:
    assert event.image is not None, "a finished image"
    return event.image


def _each(value: Any, name: str, count: int) -> Sequence[Any]:
    """Returns the value of an option for each prompt."""
    value = _plain(value)
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise errors.RequestError(
            f"{name} has {len(value)} entries for {count} prompts; give one each, or one value",
            param=name,
        )
    return [_plain(one) for one in value]


def _plain(value: Any) -> Any:
    """Returns Python's numbers for those of numpy, whose types the checks do not know."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _listed(values: Any, name: str) -> list[Any]:
    if isinstance(values, Mapping) or not hasattr(values, "__iter__"):
        raise errors.RequestError(
            f"{name} must be a text or a list of texts, got {errors.quote(values)}", param=name
        )
    return list(values)


def _latents(latents: Any, count: int) -> Sequence[np.ndarray | None]:
    """Returns the initial latents of each image: those of one array, or of a list with None."""
    if latents is None:
        return [None] * count
    if isinstance(latents, list | tuple):  # images may have different sizes
        each = [
            None if one is None else _floats(one, f"latents[{place}]")
            for place, one in enumerate(latents)
        ]
    else:
        found = _floats(latents, "latents")
        if found.ndim == 0:
            raise errors.RequestError(
                "latents is one number; its first axis must be that of the images", param="latents"
            )
        each = list(found)
    if len(each) != count:
        raise errors.RequestError(
            f"latents are for {len(each)} images, not for {count}; the first axis, or the list, is "
            "that of the images",
            param="latents",
        )
    return each


def _floats(latents: Any, name: str) -> np.ndarray:
    """Returns float32."""
    try:
        found = np.asarray(latents)
    except ValueError:  # lists of unequal lengths
        found = np.empty((), object)
    # numpy does not count bfloat16, which JAX adds to it.
    if not np.issubdtype(found.dtype, np.floating) and found.dtype.name != "bfloat16":
        raise errors.RequestError(
            f"{name} must be an array of floats, got {errors.quote(latents)}", param="latents"
        )
    return found.astype(np.float32, copy=False)
