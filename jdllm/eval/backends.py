"""Where the answers come from: an engine in this process, or a server over HTTP.

Both answer one prompt per call and are called from several threads at once, so one
sliding window keeps the engine or the server busy and a finished answer is written at once.
"""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jdllm import errors, sampling_params
from jdllm.engine import engine as engine_lib

# Answers beyond this are cut unless --max-new-tokens says otherwise; as in SGLang's script.
DEFAULT_MAX_NEW_TOKENS = 512
HTTP_ATTEMPTS = 20
POLL_S = 1.0


class BackendError(RuntimeError):
    """Says that no answer can be had: server gone, key wrong, request refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one prompt; `nfe` is None when the server does not tell."""

    text: str
    completion_tokens: int
    nfe: int | None
    finish_reason: str
    latency_s: float


class Backend(Protocol):
    """Answers prompts; `sampling` has the keys of `SamplingParams`."""

    default_parallel: int

    def answer(self, prompt: str, sampling: Mapping[str, Any]) -> Answer: ...

    def describe(self) -> dict[str, Any]: ...

    def abort(self) -> None: ...


class InProcess:
    """Answers from an engine in this process, through its chat template when it has one."""

    def __init__(self, engine: engine_lib.Engine):
        self._engine = engine
        self.default_parallel = 2 * engine.max_running_requests
        if engine.tokenizer is None:
            raise errors.ConfigError("evaluation needs a tokenizer")

    def answer(self, prompt: str, sampling: Mapping[str, Any]) -> Answer:
        ids = self._prompt_ids(prompt)
        params = sampling_params.SamplingParams.from_mapping(sampling)
        if params.max_new_tokens is None:
            room = self._engine.default_max_new_tokens(len(ids))
            params = dataclasses.replace(params, max_new_tokens=min(room, DEFAULT_MAX_NEW_TOKENS))
        try:
            *_, last = self._engine.iterate([ids], [params])
        except errors.RequestError as error:
            raise BackendError(f"the engine refuses the request: {error}") from error
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
        device = jax.local_devices()[0]
        return {
            "kind": "in-process",
            "model": self._engine.model_name,
            "device": f"{device.platform}: {device.device_kind}",
        }

    def abort(self) -> None:
        self._engine.abort(abort_all=True)

    def _prompt_ids(self, prompt: str) -> list[int]:
        if self._engine.tokenizer.has_chat_template:
            messages = [{"role": "user", "content": prompt}]
            return self._engine.tokenizer.apply_chat_template(messages)
        return self._engine.encode(prompt)


class Http:
    """Answers from an OpenAI-compatible server; checks its health before anything else."""

    default_parallel = 32

    def __init__(
        self,
        base_url: str,
        *,
        api: str = "chat",
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ):
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._api = api
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        parts = urllib.parse.urlsplit(self._base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise errors.ConfigError(f"{base_url=} must look like http://127.0.0.1:30000")
        is_here = parts.hostname in ("localhost", "127.0.0.1", "::1")
        # A proxy set for the outside world must not swallow calls to this machine.
        handlers = [urllib.request.ProxyHandler({})] if is_here else []
        self._opener = urllib.request.build_opener(*handlers)
        self._wait_until_healthy()
        models = self._json("GET", "/v1/models")["data"]
        if not models:
            raise BackendError(f"the server at {self._base_url} lists no model")
        self._model = models[0]["id"]

    def answer(self, prompt: str, sampling: Mapping[str, Any]) -> Answer:
        body = {key: value for key, value in sampling.items() if value not in (None, {}, [], ())}
        body["max_tokens"] = body.pop("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        body["model"] = self._model
        if self._api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        route = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"
        began = time.monotonic()
        reply = self._json("POST", route, body)
        choice, usage = reply["choices"][0], reply["usage"]
        text = choice["message"]["content"] if self._api == "chat" else choice["text"]
        return Answer(
            text=text or "",
            completion_tokens=usage["completion_tokens"],
            nfe=(usage.get("dllm") or {}).get("nfe"),
            finish_reason=choice["finish_reason"],
            latency_s=time.monotonic() - began,
        )

    def describe(self) -> dict[str, Any]:
        """Returns what identifies the server, and its own account of itself if it has one."""
        try:
            info = self._json("GET", "/server_info")
        except BackendError:
            info = {}
        keep = ("device", "dtype", "max_running_requests", "block_size", "version")
        return {
            "kind": "http",
            "base_url": self._base_url,
            "api": self._api,
            "model": self._model,
            **{key: info[key] for key in keep if key in info},
        }

    def abort(self) -> None:
        """Does nothing: requests in flight end with their connection."""

    def _wait_until_healthy(self) -> None:
        """Waits while the server says it is starting (503); anything else but 200 is an error."""
        for _ in range(int(self._timeout_s / POLL_S) + 1):
            try:
                with self._opener.open(f"{self._base_url}/health", timeout=30):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != 503:
                    raise BackendError(
                        f"{self._base_url}/health answers {error.code}; is this the right server?"
                    ) from error
            except OSError as error:
                raise BackendError(f"no server at {self._base_url}: {error}") from error
            time.sleep(POLL_S)
        raise BackendError(f"the server at {self._base_url} did not become ready")

    def _json(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Returns the parsed reply; a full queue (503) is tried again after `Retry-After`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base_url + route, data=data, headers=self._headers, method=method
        )
        for attempt in range(HTTP_ATTEMPTS):
            try:
                with self._opener.open(request, timeout=self._timeout_s) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace")[:500]
                if error.code != 503 or attempt + 1 == HTTP_ATTEMPTS:
                    raise BackendError(f"{route} answers {error.code}: {text}") from error
                time.sleep(float(error.headers.get("Retry-After", POLL_S)))
            except (OSError, json.JSONDecodeError) as error:
                raise BackendError(f"{route} of {self._base_url} failed: {error}") from error
        raise AssertionError("the last attempt returns or raises")
