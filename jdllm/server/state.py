"""What the routes share: the configuration, the engine once it is ready, and the phase.

The loading thread delivers the engine after the port is open, so every route asks this module
for it. The engine writes text or makes images. Routes that serve both kinds ask for `served`; the
others for `engine` or `images`, which raise a 400 if the model is of the other kind. The phase
moves in one direction: starting, ready, draining.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Literal

from starlette import requests

from jdllm import errors
from jdllm.options import config
from jdllm.server.edge import keys, live_requests, metrics, responses
from jdllm.server.edge.image_store import ImageStore
from jdllm.server.edge.token_texts import TokenTexts

if TYPE_CHECKING:
    from jdllm.engine import serving, text_serving, tokenizer
    from jdllm.engine.images.requests import ImageServing
    from jdllm.engine.start import startup

ServerPhase = Literal["starting", "ready", "draining"]


@dataclasses.dataclass(slots=True)
class ServerState:
    """One server; `lifecycle` writes it, the routes read it."""

    server_config: config.ServerConfig
    progress: startup.StartupProgress
    phase: ServerPhase = "starting"
    loaded_engine: text_serving.TextServing | ImageServing | None = None
    created_s: int = dataclasses.field(default_factory=lambda: int(time.time()))
    ping_interval_s: float = 15.0
    keys: keys.Keys = dataclasses.field(init=False)
    live: live_requests.LiveRequests = dataclasses.field(
        default_factory=live_requests.LiveRequests, init=False
    )
    metrics: metrics.EdgeMetrics = dataclasses.field(init=False)
    image_store: ImageStore = dataclasses.field(default_factory=ImageStore)
    _token_texts: TokenTexts | None = None

    def __post_init__(self) -> None:
        self.keys = keys.load(self.server_config)
        self.metrics = metrics.EdgeMetrics(lambda: self.loaded_engine)

    @property
    def served(self) -> serving.Serving:
        """The engine, of either kind; the gate middleware lets no request in before it exists."""
        return self._loaded

    @property
    def engine(self) -> text_serving.TextServing:
        """The engine that writes text; raises a 400 if the model makes images."""
        loaded = self._loaded
        if loaded.output_modality == "image":
            raise errors.RequestError(
                f"the model {loaded.model_name!r} makes images and this route serves models that "
                "write text; send a prompt to POST /v1/images/generations",
                param="model",
            )
        return loaded

    @property
    def images(self) -> ImageServing:
        """The engine that makes images; raises a 400 if the model writes text."""
        loaded = self._loaded
        if loaded.output_modality == "text":
            raise errors.RequestError(
                f"the model {loaded.model_name!r} writes text and this route serves models that "
                "make images; send messages to POST /v1/chat/completions",
                param="model",
            )
        return loaded

    @property
    def _loaded(self) -> text_serving.TextServing | ImageServing:
        if self.loaded_engine is None:
            raise errors.EngineStopped("the server is starting")
        return self.loaded_engine

    @property
    def tokenizer(self) -> tokenizer.Tokenizer:
        """The tokenizer; raises a 400 if the server runs without one."""
        found = self.engine.tokenizer
        if found is None:
            raise errors.RequestError(
                "this server runs with --skip-tokenizer-init: it takes POST /generate with "
                "input_ids only"
            )
        return found

    @property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens; raises a 400 if the server runs without a tokenizer."""
        if self._token_texts is None:
            self._token_texts = TokenTexts(self.tokenizer)
        return self._token_texts

    def check_model(self, name: str | None) -> None:
        """Refuses the name of another model if `strict_model_name` is set."""
        if self.server_config.strict_model_name and name not in (None, self.served.model_name):
            raise model_not_found(name)


def model_not_found(name: str) -> responses.NotFound:
    """Returns OpenAI's error for a model that is not served here."""
    return responses.NotFound(
        f"The model {errors.quote(name)} does not exist", param="model", code="model_not_found"
    )


def of(request: requests.Request) -> ServerState:
    """Returns the state of the app that serves `request`."""
    return request.app.state.server


async def needs_text(request: requests.Request) -> None:
    """Answers 400 on the routes of text models, whatever the body, if the model makes images."""
    _ = of(request).engine


async def needs_images(request: requests.Request) -> None:
    """Answers 400 on the routes of image models, whatever the body, if the model writes text."""
    _ = of(request).images
