"""Flags that say which server a benchmark measures, and how it is addressed."""

from __future__ import annotations

import argparse

from jdllm import errors
from jdllm.bench import command_line


def add(group: argparse._ArgumentGroup, *, port: int | None, default_port: str) -> None:
    """Adds all but --base-url; `default_port` says in words what `port` is."""
    group.add_argument("--host", default="127.0.0.1", help="where the server is")
    group.add_argument(
        "--port",
        type=command_line.positive,
        default=port,
        help=f"its port (default: {default_port})",
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=command_line.seconds,
        default=60.0,
        metavar="S",
        help="how long to wait for the server",
    )
    group.add_argument("--model", help="must be what the server lists (default: its first)")
    group.add_argument("--api-key", help="bearer key of the server")
    group.add_argument("--header", nargs="+", default=[], metavar="KEY=VALUE", help="HTTP headers")


def headers(options: argparse.Namespace) -> dict[str, str]:
    """Returns the HTTP headers that --header and --api-key ask for."""
    found = {}
    for pair in options.header:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise errors.ConfigError(f"--header {pair!r} is not KEY=VALUE")
        found[key] = value
    if options.api_key is not None:
        found["Authorization"] = f"Bearer {options.api_key}"
    return found


def address(options: argparse.Namespace, port: int) -> str:
    """Returns the URL that --host and --port give; `port` if the latter is not given."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{options.port or port}"
