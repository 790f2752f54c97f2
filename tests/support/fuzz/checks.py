"""What every answer must keep, whatever was asked. A broken law raises `Wrong`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from support.fuzz import asks, wire

STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 415, 503})
ERROR_FIELDS = {"message", "type", "param", "code"}
MAX_ERROR_BYTES = 6000
REQUEST_ID = re.compile(r"[\w.:/+=@~|-]{1,128}", re.ASCII)
LOG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] [A-Z]+ [\w.]+: [^\x00-\x1f\x7f\u2028]*")
# uvicorn's answer to what is no HTTP
NO_HTTP = b"Invalid HTTP request received."


class Wrong(AssertionError):
    """Says that an answer breaks a law."""


def need(condition: object, message: str) -> None:
    if not condition:
        raise Wrong(message)


def shape(reply: wire.Reply, path: str | None, method: str) -> dict[str, Any] | None:
    """Checks the form of an answer; returns the error that it is, None if it is none.

    `path` None: not known, as where two requests have run into one another.
    """
    need(reply.status in STATUSES, f"status {reply.status}: {reply.body[:300]!r}")
    if reply.status == 400 and reply.body == NO_HTTP:
        return None
    request_id = reply.headers.get("x-request-id")
    need(request_id and REQUEST_ID.fullmatch(request_id), f"x-request-id {request_id!r}")
    if method == "HEAD":
        need(not reply.body, "HEAD has a body")
        return None
    kind = reply.headers.get("content-type", "")
    if kind == "application/json":
        content = json.loads(reply.body)
    if reply.status < 400:
        return None
    need(kind == "application/json", f"{reply.status} as {kind!r}")
    need(len(reply.body) <= MAX_ERROR_BYTES, f"an error of {len(reply.body)} bytes")
    if reply.status == 503:
        need("retry-after" in reply.headers, "503 without retry-after")
    need(set(content) == {"error"}, f"error {content!r}")
    error = content["error"]
    if path is None or path.startswith("/api/"):
        is_plain = isinstance(error, str) and bool(error)
        need(is_plain or path is None, f"error {content!r}")
        if is_plain:
            return {"message": error, "param": None}
    need(set(error) == ERROR_FIELDS, f"error {content!r}")
    need(isinstance(error["message"], str) and error["message"], f"error {content!r}")
    return error


def names(error: dict[str, Any], params: Sequence[str], path: str) -> None:
    """Checks that an error names a field at fault: as `param`, or in Ollama's text."""
    lasts = {param.rpartition(".")[2] for param in params}
    if path.startswith("/api/"):
        named = any(last in error["message"].replace("dLLM", "dllm") for last in lasts)
    else:
        named = not lasts.isdisjoint((error["param"] or "").split("."))
    need(named, f"{params} are not named: {error}")


Choice = tuple[str, str]  # text, how it ended


def choices(path: str, reply: wire.Reply, *, is_stream: bool) -> list[Choice]:
    """Returns the choices of an answer in their order, whole or put together from a stream."""
    if not is_stream:
        return _whole(path, json.loads(reply.body))
    if path.startswith("/api/"):
        events = [json.loads(line) for line in reply.body.splitlines()]
        need(events[-1]["done"] is True, f"the stream ends with {events[-1]}")
        return _joined(path, events)
    frames = [part for part in reply.body.split(b"\n\n") if part]
    if path == asks.RESPONSES:
        pairs = [frame.split(b"\n", 1) for frame in frames]
        events = [json.loads(data.removeprefix(b"data: ")) for _, data in pairs]
        need(
            all(name == b"event: " + one["type"].encode() for (name, _), one in zip(pairs, events)),
            "an event has two names",
        )
        need([one["sequence_number"] for one in events] == list(range(len(events))), "numbers")
        deltas = (one["delta"] for one in events if one["type"] == "response.output_text.delta")
        (found,) = _whole(path, events[-1]["response"])
        need("".join(deltas) == found[0], "the deltas are not the text")
        return [found]
    need(frames[-1] == b"data: [DONE]", f"the stream ends with {frames[-1][:300]!r}")
    events = [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-1]]
    return _joined(path, events)


def _whole(path: str, content: Any) -> list[Choice]:
    match path:
        case "/v1/chat/completions":
            return [(c["message"]["content"], c["finish_reason"]) for c in content["choices"]]
        case "/v1/completions":
            return [(c["text"], c["finish_reason"]) for c in content["choices"]]
        case "/generate":
            replies = content if isinstance(content, list) else [content]
            return [(r["text"], r["meta_info"]["finish_reason"]["type"]) for r in replies]
        case "/v1/responses":
            (item,) = content["output"]
            ends = {"completed": "stop", "incomplete": "length", "failed": "abort"}
            return [("".join(p["text"] for p in item["content"]), ends[content["status"]])]
        case "/api/chat":
            return [(content["message"]["content"], content["done_reason"])]
        case _:
            return [(content["response"], content["done_reason"])]


def _joined(path: str, events: list[dict[str, Any]]) -> list[Choice]:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for event in events:
        need("error" not in event or path.startswith("/api/"), f"an error in a stream: {event}")
        for index, text, end, is_whole in _parts(path, event):
            texts[index] = text if is_whole else texts.get(index, "") + text
            if end is not None:
                need(index not in ends, f"choice {index} ends twice")
                ends[index] = end
    need(sorted(ends) == sorted(texts) == list(range(len(texts))), f"choices {texts}, {ends}")
    return [(texts[index], ends[index]) for index in sorted(texts)]


def _parts(path: str, event: dict[str, Any]):
    """Yields the index, the text, the end, and whether the text is all of it so far."""
    if path in (asks.CHAT, asks.TEXT):
        for choice in event["choices"]:
            text = choice["text"] if path == asks.TEXT else choice["delta"].get("content", "")
            yield choice["index"], text, choice["finish_reason"], False
    elif path == asks.GENERATE:
        end = event["meta_info"]["finish_reason"]
        yield event.get("index", 0), event["text"], end and end["type"], True
    else:
        text = event["message"]["content"] if path == asks.OLLAMA_CHAT else event["response"]
        yield 0, text, event.get("done_reason"), False


def right(found: list[Choice], expected: Choice, asked: asks.Asked) -> None:
    """Checks the choices of an answer against what the question has for an answer."""
    need(len(found) == asked.num_choices, f"{len(found)} choices of {asked.num_choices}")
    text, end = expected
    for one, how in found:
        if how == "abort":  # another attacker, with the same key, has ended it
            need((asked.before + text).startswith(one), f"{one!r} begins {text!r} otherwise")
        else:
            need((one, how) == (asked.before + text, end), f"{(one, how)} for {(text, end)}")
