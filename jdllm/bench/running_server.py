"""What benchmarks over HTTP ask a server before and after the load: its model, its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm.bench import command_line
from jdllm.client import failures, retries, transport

TIMEOUT_S = 6 * 3600.0  # as SGLang; of all that are sent at once, the last may wait for hours
POLL_S = 0.5


def find_model(client: transport.Client, wanted: str | None, *, timeout_s: float) -> str:
    """Waits for the server and returns the model's name; a wrong name raises a BenchError."""
    start = retries.Retries(pause_s=POLL_S, timeout_s=timeout_s, when_absent=True)
    try:
        cards = start.call(lambda: client.json("GET", "/v1/models")).get("data") or []
    except failures.CallFailed as error:
        raise command_line.BenchError(
            f"no server at {client.base_url}: {error}"
            if start.covers(error)
            else f"{client.base_url} does not answer as a model server: {error}"
        ) from error
    served = [card["id"] for card in cards]
    if wanted is None and not served:
        raise command_line.BenchError(f"{client.base_url} lists no model; give --model")
    if wanted is not None and wanted not in served:
        raise command_line.BenchError(
            f"{client.base_url} does not serve {wanted!r} but {', '.join(served) or 'nothing'}; "
            "leave --model out or give that name with --served-model-name"
        )
    return wanted or served[0]


def server_info(client: transport.Client) -> dict[str, Any] | None:
    """Returns the server's `/server_info`, None if it has none."""
    try:
        info = client.json("GET", "/server_info")
    except failures.CallFailed:
        return None
    return info if isinstance(info, dict) else None


def state(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the numbers in a `/server_info`: the engine's statistics."""
    states = (info or {}).get("internal_states") or [{}]
    return states[0]
