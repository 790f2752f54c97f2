"""Where the answers come from: an engine in this process, or a server over HTTP.

Both answer one prompt per call, and several threads call them at once. So the engine or the
server always has work, and each answer is written as soon as it is finished.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Protocol

from jdllm import errors
from jdllm.checkpoint import fingerprint
from jdllm.client import api, failures, retries, transport
from jdllm.engine.engine import Engine
from jdllm.engine.images.engine import ImageEngine
from jdllm.options import sampling_params

# The longest answer unless --max-new-tokens gives another; as in SGLang's script.
DEFAULT_MAX_NEW_TOKENS = 512
KINDS: dict[str, api.Kind] = {"chat": "chat", "completion": "completions"}
# If the queue of a server is full, the call is repeated after the time that the server gives.
WHEN_FULL = retries.Retries(pause_s=1.0, max_attempts=20, obeys_server=True)
POLL_S = 1.0
HEALTH_TIMEOUT_S = 30.0


class BackendError(RuntimeError):
    """Says that there is no answer: server gone, key wrong, request refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one prompt; `nfe` is None if the server does not send it."""

    text: str
    completion_tokens: int
    nfe: int | None
    finish_reason: str
    latency_s: float


class Backend(Protocol):
    """Answers prompts; `sampling` has the keys of `SamplingParams`.

    A text is a question: it goes through the chat template, if there is one, or as the API of the
    server says. Messages of a chat and token ids are taken as they are.
    """

    default_parallel: int

    def answer(self, prompt: api.Content, sampling: Mapping[str, Any]) -> Answer: ...

    def describe(self) -> dict[str, Any]: ...

    def abort(self) -> None: ...


def of_engine(engine: Engine | ImageEngine) -> dict[str, Any]:
    """Returns what identifies the model and the machine; reads the model's files."""
    return {
        "kind": "in-process",
        "model": engine.model_name,
        "model_files": fingerprint.of_folder(engine.model_dir),
        "device": str(engine.device),
    }


def identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of a backend's description tells its answers from those of another model.

    The files of a server's model are not known.
    """
    return {name: about.get(name) for name in ("model", "model_files")}


class InProcess:
    """Answers from an engine in this process; uses the model's chat template if it has one."""

    def __init__(self, engine: Engine):
        if engine.tokenizer is None:
            raise errors.ConfigError("evaluation needs a tokenizer")
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self.default_parallel = 2 * engine.max_running_requests
        self._about = of_engine(engine)  # once: a sweep asks for each of its points

    def answer(self, prompt: api.Content, sampling: Mapping[str, Any]) -> Answer:
        ids = self._prompt_ids(prompt)
        params = sampling_params.SamplingParams.from_mapping(sampling)
        if params.max_new_tokens is None:
            room = self._engine.default_max_new_tokens(len(ids))
            params = dataclasses.replace(params, max_new_tokens=min(room, DEFAULT_MAX_NEW_TOKENS))
        try:
            *_, last = self._engine.iterate([ids], [params])
        except errors.RequestError as error:
            raise BackendError(f"the engine refuses the request: {error}") from error
        assert last.finish_reason is not None, "the last one has ended"
        reason = last.finish_reason["type"]
        if reason == "abort":
            raise BackendError("the engine aborted the request")
        return Answer(
            text=last.text,
            completion_tokens=len(last.output_ids),
            nfe=last.meta_info["nfe"],
            finish_reason=reason,
            latency_s=last.meta_info["e2e_latency"],
        )

    def describe(self) -> dict[str, Any]:
        """Returns what identifies the model and the machine."""
        return self._about

    def abort(self) -> None:
        self._engine.abort(abort_all=True)

    def _prompt_ids(self, prompt: api.Content) -> list[int]:
        if isinstance(prompt, str):
            if not self._tokenizer.has_chat_template:
                return self._engine.encode(prompt)
            return self._tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        messages = [one for one in prompt if isinstance(one, dict)]
        if messages:
            return self._tokenizer.apply_chat_template(messages)
        return [one for one in prompt if isinstance(one, int)]


class Http:
    """Answers from an OpenAI-compatible server; checks its health before anything else."""

    default_parallel = 32

    def __init__(
        self,
        base_url: str,
        *,
        api_name: str = "chat",
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ):
        self._api = api_name
        self._kind: api.Kind = KINDS[api_name]
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = transport.Client(
            base_url, headers=headers, timeout_s=timeout_s, uses_proxies=True
        )
        self._wait_until_healthy(timeout_s)
        models = self._json("GET", "/v1/models")["data"]
        if not models:
            raise BackendError(f"the server at {self._client.base_url} lists no model")
        self._model = models[0]["id"]

    def answer(self, prompt: api.Content, sampling: Mapping[str, Any]) -> Answer:
        given = {key: value for key, value in sampling.items() if value not in (None, {}, [], ())}
        max_tokens = given.pop("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        body = api.body(
            self._kind, prompt, given, model=self._model, max_tokens=max_tokens, stream=False
        )
        began = time.monotonic()
        answer = api.Answer(self._kind)
        route = api.ROUTES[self._kind]
        try:
            answer.add(self._json("POST", route, body))
        except failures.BadAnswer as error:
            raise BackendError(str(error)) from error
        if answer.completion_tokens is None or answer.finish_reason is None:
            raise BackendError(f"{route} answers without usage or without a finish reason")
        return Answer(
            text=answer.text,
            completion_tokens=answer.completion_tokens,
            nfe=answer.nfe,
            finish_reason=answer.finish_reason,
            latency_s=time.monotonic() - began,
        )

    def describe(self) -> dict[str, Any]:
        """Returns what identifies the server, with fields of its `/server_info` if it has one."""
        try:
            info = self._json("GET", "/server_info")
        except BackendError:
            info = {}
        keep = ("device", "dtype", "max_running_requests", "block_size", "version")
        return {
            "kind": "http",
            "base_url": self._client.base_url,
            "api": self._api,
            "model": self._model,
            **{key: info[key] for key in keep if key in info},
        }

    def abort(self) -> None:
        """Does nothing: requests in flight end with their connection."""

    def _wait_until_healthy(self, timeout_s: float) -> None:
        """Waits while the server is starting (503); any other answer than 200 is an error."""
        base_url = self._client.base_url
        client = transport.Client(base_url, timeout_s=HEALTH_TIMEOUT_S, uses_proxies=True)
        start = retries.Retries(pause_s=POLL_S, max_attempts=int(timeout_s / POLL_S) + 1)
        try:
            start.call(lambda: client.text("GET", "/health"))
        except failures.Refused as error:
            if start.covers(error):
                raise BackendError(f"the server at {base_url} did not become ready") from error
            raise BackendError(
                f"{base_url}/health answers {error.status}; is this the right server?"
            ) from error
        except failures.CallFailed as error:
            raise BackendError(f"no server at {base_url}: {error}") from error

    def _json(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return WHEN_FULL.call(lambda: self._client.json(method, route, body))
        except failures.CallFailed as error:
            raise BackendError(str(error)) from error
