"""Where pictures come from: an image engine in this process, or a server over HTTP.

Both make one picture per call, and several threads call them at once.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import time
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from jdllm import errors
from jdllm.engine import requests
from jdllm.engine.images.engine import ImageEngine
from jdllm.eval import backends

ROUTE = "/v1/images/generations"
Picture = UInt8[np.ndarray, "height width 3"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One picture to make; None is the model's default."""

    prompt: str
    height: int
    width: int
    seed: int
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    residual_diff_threshold: float | None = None

    def options(self) -> dict[str, Any]:
        """Returns the options that are given."""
        found = {
            "num_inference_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "residual_diff_threshold": self.residual_diff_threshold,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A picture, and how many of its steps left out most of the transformer."""

    picture: Picture
    skipped_steps: int


class Backend(Protocol):
    """Makes pictures; `default_size` is the model's (height, width)."""

    default_parallel: int
    default_size: tuple[int, int]
    default_steps: int

    def picture(self, wanted: Wanted, /) -> Made: ...

    def describe(self) -> dict[str, Any]: ...

    def abort(self) -> None: ...


class InProcess:
    """Pictures from an engine in this process."""

    def __init__(self, engine: ImageEngine):
        self._engine = engine
        self.default_parallel = 2 * engine.max_running_requests
        self.default_size = (engine.facts.default_height, engine.facts.default_width)
        self.default_steps = engine.facts.default_steps
        self._about = backends.of_engine(engine) | {
            "dtype": engine.config.dtype,
            "quantization": engine.config.quantization,
        }

    def picture(self, wanted: Wanted) -> Made:
        try:
            (image,) = self._engine.generate(
                wanted.prompt,
                height=wanted.height,
                width=wanted.width,
                seed=wanted.seed,
                use_tqdm=False,
                **wanted.options(),
            )
        except errors.RequestError as error:
            raise backends.BackendError(f"the engine refuses the request: {error}") from error
        except requests.EngineFault as error:
            raise backends.BackendError(f"a launch failed on the device: {error}") from error
        assert isinstance(image, Image.Image), "the default output type"
        return Made(picture=np.asarray(image), skipped_steps=image.info["num_skipped_steps"])

    def describe(self) -> dict[str, Any]:
        """Returns what identifies the model and the machine."""
        return self._about

    def abort(self) -> None:
        self._engine.abort(abort_all=True)


class Http(backends.Http):
    """Pictures from a server with OpenAI's images endpoint."""

    def __init__(self, base_url: str, **options: Any):
        super().__init__(base_url, **options)
        try:
            told = self._json("GET", "/model_info")["preferred_sampling_params"]
            self.default_size = (int(told["height"]), int(told["width"]))
            self.default_steps = int(told["num_inference_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise backends.BackendError(
                f"the model at {base_url} makes no images: its /model_info tells no size of them"
            ) from error

    def picture(self, wanted: Wanted) -> Made:
        body = {
            "model": self._model,
            "prompt": wanted.prompt,
            "size": f"{wanted.width}x{wanted.height}",
            "seed": wanted.seed,
            "response_format": "b64_json",
            "output_format": "png",  # without loss
            **wanted.options(),
        }
        answer = self._json("POST", ROUTE, body)
        try:
            (one,) = answer["data"]
            content = base64.b64decode(one["b64_json"])
            picture = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
            # Other servers of OpenAI's endpoint have no such count.
            return Made(picture=picture, skipped_steps=int(one.get("num_skipped_steps", 0)))
        except (KeyError, ValueError, TypeError, binascii.Error, OSError) as error:
            raise backends.BackendError(f"{ROUTE} answers without an image: {error!r}") from error

    def describe(self) -> dict[str, Any]:
        """Returns what identifies the server; these pictures go through no text API."""
        return {name: value for name, value in super().describe().items() if name != "api"}


def timed(backend: Backend, wanted: Wanted) -> tuple[Made, float]:
    """Returns a picture and the seconds that it took."""
    began_s = time.monotonic()
    return backend.picture(wanted), time.monotonic() - began_s
