"""Checks of requests for images that need no device: what `ImageFacts` says is enough.

The server and the offline API call the same functions, so both refuse the same requests with the
same words. Everything here is a `RequestError` that names its field.
"""

from __future__ import annotations

import dataclasses
import re
import secrets

import numpy as np

from jdllm import errors, value_checks
from jdllm.engine.images import requests

MAX_PROMPT_CHARACTERS = 32_000  # OpenAI's
MAX_PARTIAL_IMAGES = 3  # OpenAI's
MAX_GUIDANCE = 100.0
MAX_RESIDUAL_DIFF = 1.0  # a change as large as what changes
MAX_SEED = (1 << 63) - 1
RANDOM_SEED = -1  # what user interfaces write
# A drawn seed has fewer bits, so that a program that reads JSON numbers as floats can repeat it.
DRAWN_SEED_BITS = 32
SIZE = re.compile(r"(\d{1,6})x(\d{1,6})", re.ASCII)


def resolve(request: requests.ImageRequest, facts: requests.ImageFacts) -> requests.ImageRequest:
    """Returns `request` with every default filled in, or raises a `RequestError` with its field.

    Options that the pipeline does not have stay None, and so does a `true_cfg_scale` without a
    negative prompt to weigh. A seed is drawn where there is none; apart from that, a request that
    is resolved already comes back as it is.
    """
    _check_prompt(request.prompt, "prompt")
    height = _side(request.height, "height", facts.default_height, facts)
    width = _side(request.width, "width", facts.default_width, facts)
    if height * width > facts.max_pixels:
        raise errors.RequestError(
            f"{width}x{height} has {height * width} pixels, at most {facts.max_pixels} are made; "
            "lower width or height",
            param="height" if request.height is not None else "width",
        )
    resolved = dataclasses.replace(
        request,
        height=height,
        width=width,
        num_inference_steps=_integer(
            request.num_inference_steps, "num_inference_steps", facts.default_steps,
            low=1, high=facts.max_steps,
        ),
        guidance_scale=_scale(
            request.guidance_scale, "guidance_scale", facts.default_guidance_scale, facts
        ),
        true_cfg_scale=_scale(
            request.true_cfg_scale, "true_cfg_scale", facts.default_true_cfg_scale, facts
        ),
        max_sequence_length=_integer(
            request.max_sequence_length, "max_sequence_length", facts.default_max_sequence_length,
            low=1, high=facts.max_sequence_length,
        ),
        seed=seeds(request.seed, 1)[0],
        partial_images=_integer(
            request.partial_images, "partial_images", 0, low=0, high=MAX_PARTIAL_IMAGES
        ),
        residual_diff_threshold=_threshold(request.residual_diff_threshold, facts),
        latents=_latents(request.latents, facts.latents_shape(height, width)),
    )  # fmt: skip
    return _with_guidance(resolved, request, facts)


def seeds(seed: object, count: int) -> list[int]:
    """Returns the seed of each of `count` images.

    One integer is the seed of the first image, and the others have those that follow; a list has
    one for each image. Without a seed, and for each -1, an image has a random one.
    """
    if isinstance(seed, list | tuple):
        if len(seed) != count:
            raise errors.RequestError(
                f"seed has {len(seed)} entries for {count} images; give one each", param="seed"
            )
        return [_seed(one) for one in seed]
    if seed is None or value_checks.whole(seed) == RANDOM_SEED:
        return [_seed(RANDOM_SEED) for _ in range(count)]
    first = _seed(seed)
    return [(first + place) % (MAX_SEED + 1) for place in range(count)]


def _seed(seed: object) -> int:
    found = value_checks.check_integer(seed, "seed", low=RANDOM_SEED, high=MAX_SEED)
    return secrets.randbits(DRAWN_SEED_BITS) if found == RANDOM_SEED else found


def size_of(size: object) -> tuple[int, int] | None:
    """Returns (width, height) of a `WIDTHxHEIGHT`, None for "auto", the pipeline's default."""
    if size == "auto":
        return None
    found = SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None:
        raise errors.RequestError(
            f"size must be WIDTHxHEIGHT, such as 1024x1024, or auto, got {errors.quote(size)}",
            param="size",
        )
    return int(found[1]), int(found[2])


def _check_prompt(value: object, param: str) -> None:
    if not isinstance(value, str):
        raise errors.RequestError(f"{param} must be a text, got {errors.quote(value)}", param=param)
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise errors.RequestError(
            f"{param} has {len(value)} characters, at most {MAX_PROMPT_CHARACTERS} are taken",
            param=param,
        )
    value_checks.check_unicode(value, param)


def _integer(value: int | None, param: str, default: int, *, low: int, high: int) -> int:
    if value is None:
        return default
    return value_checks.check_integer(value, param, low=low, high=high)


def _side(value: int | None, param: str, default: int, facts: requests.ImageFacts) -> int:
    multiple = facts.size_multiple
    side = _integer(value, param, default, low=multiple, high=facts.max_side)
    if side % multiple:
        below = side // multiple * multiple
        raise errors.RequestError(
            f"{param}={side} must be a multiple of {multiple}, such as {below} or "
            f"{below + multiple}",
            param=param,
        )
    return side


def _scale(
    value: float | None, param: str, default: float | None, facts: requests.ImageFacts
) -> float | None:
    if value is None:
        return default
    value_checks.check_number(value, param, low=0.0, high=MAX_GUIDANCE)
    if default is None:
        if value in (0.0, 1.0):  # both ask for no guidance
            return None
        raise errors.RequestError(
            f"{param}={errors.quote(value)} is not supported: the pipeline of {facts.family} has "
            "no such option; leave it out",
            param=param,
        )
    return float(value)


def _threshold(value: float | None, facts: requests.ImageFacts) -> float | None:
    """Returns the threshold of the step cache, None for 0, which asks for none."""
    param = "residual_diff_threshold"
    if value is None:
        return None
    value_checks.check_number(value, param, low=0.0, high=MAX_RESIDUAL_DIFF)
    if value and not facts.has_step_cache:
        raise errors.RequestError(
            f"{param}={value} needs a server that was started with --enable-step-cache, for a "
            "pipeline that has such a cache; leave it out",
            param=param,
        )
    return float(value) or None


def _latents(value: object, shape: tuple[int, ...]) -> np.ndarray | None:
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.floating):
        raise errors.RequestError("latents must be an array of floats", param="latents")
    if value.shape != shape:
        raise errors.RequestError(
            f"latents have the shape {list(value.shape)}, wanted is {list(shape)}", param="latents"
        )
    if not np.isfinite(value).all():
        raise errors.RequestError(
            "latents hold values that are not finite (NaN or infinity)", param="latents"
        )
    return value.astype(np.float32, copy=False)


def _with_guidance(
    resolved: requests.ImageRequest,
    given: requests.ImageRequest,
    facts: requests.ImageFacts,
) -> requests.ImageRequest:
    """Returns `resolved` with the options of classifier-free guidance checked and filled in."""
    if given.negative_prompt is not None:
        _check_prompt(given.negative_prompt, "negative_prompt")
    guided = requests.is_guided(resolved, facts)
    if not guided:
        if given.negative_prompt:
            raise _no_effect("negative_prompt", resolved, facts)
        wanted = given.true_cfg_scale
        if facts.cfg_switch == "true_cfg_scale" and wanted is not None and wanted > 1.0:
            raise errors.RequestError(
                f"true_cfg_scale={wanted} has no effect without a negative_prompt; give one (it "
                "may be empty), or leave true_cfg_scale out",
                param="true_cfg_scale",
            )
    truncation = 1.0 if given.cfg_truncation is None else given.cfg_truncation
    value_checks.check_number(truncation, "cfg_truncation", low=0.0, high=MAX_GUIDANCE)
    normalization = given.cfg_normalization
    if normalization is None or isinstance(normalization, bool):
        normalization = 1.0 if normalization else 0.0
    value_checks.check_number(normalization, "cfg_normalization", low=0.0, high=MAX_GUIDANCE)
    has_limits = guided and facts.has_cfg_limits
    if truncation < 1.0 and not has_limits:
        raise _no_effect("cfg_truncation", resolved, facts)
    if normalization and not has_limits:
        raise _no_effect("cfg_normalization", resolved, facts)
    negative = (given.negative_prompt or "") if guided else None
    has_no_use = facts.cfg_switch == "true_cfg_scale" and not guided
    return dataclasses.replace(
        resolved,
        negative_prompt=negative,
        true_cfg_scale=None if has_no_use else resolved.true_cfg_scale,
        cfg_truncation=min(float(truncation), 1.0) if facts.has_cfg_limits else None,
        cfg_normalization=float(normalization) if facts.has_cfg_limits else None,
    )


def _no_effect(
    param: str, request: requests.ImageRequest, facts: requests.ImageFacts
) -> errors.RequestError:
    """Returns the error for an option of guidance in a request that runs without.

    Who does what it says gets an image, whatever the pipeline is.
    """
    is_option = param == "negative_prompt" or facts.has_cfg_limits
    if facts.cfg_switch is None or not is_option:
        return errors.RequestError(
            f"{param} is not supported: the pipeline of {facts.family} has no such option; leave "
            "it out",
            param=param,
        )
    switch, least = facts.cfg_switch, 0 if facts.cfg_switch == "guidance_scale" else 1
    wanted = f"give a {switch} above {least}"
    if switch == "true_cfg_scale" and request.negative_prompt is None:
        wanted += " and a negative_prompt (it may be empty)"
    return errors.RequestError(
        f"{param} has no effect at {switch}={getattr(request, switch) or 0:g}; {wanted}, or leave "
        f"{param} out",
        param=param,
    )
