"""`/docs`: the routes and their fields in one page without scripts.

FastAPI's own pages load their scripts from a public network. This server must be usable, and its
keys safe, on a machine that reaches no other. The routes are no coroutines, so that a thread runs
them: the first one makes the schema of all requests.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm.server.edge import responses

router = fastapi.APIRouter()

Schema = Mapping[str, Any]
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h2{font:600 1.1rem ui-monospace,monospace;margin-top:2rem}
table{border-collapse:collapse}td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}
code,td:first-child{font-family:ui-monospace,monospace}.verb{color:#06c}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}.verb{color:#6af}}
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


@router.api_route("/openapi.json", methods=["GET", "HEAD"], include_in_schema=False)
def openapi(request: requests.Request) -> starlette_responses.Response:
    """Returns the schema of all routes."""
    return responses.json_response(request.app.openapi())


@router.get("/docs", include_in_schema=False)
def docs(request: requests.Request) -> starlette_responses.Response:
    """Shows every route with its fields."""
    return starlette_responses.HTMLResponse(page(request.app.openapi()), headers=HEADERS)


def page(schema: Schema) -> str:
    """Returns the page of an OpenAPI schema."""
    title = html.escape(f"{schema['info']['title']} {schema['info']['version']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{STYLE}</style><h1>{title}</h1>",
        '<p>The same as data: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, operations in schema["paths"].items():
        for verb, operation in operations.items():
            parts += _operation(path, verb, operation)
    return "\n".join(parts)


def _operation(path: str, verb: str, operation: Schema) -> Iterator[str]:
    yield f"<h2><span class=verb>{html.escape(verb.upper())}</span> {html.escape(path)}</h2>"
    yield f"<p>{html.escape(operation.get('description', ''))}</p>"
    rows = [
        (f"?{one['name']}" if one["in"] == "query" else one["name"], one["schema"])
        for one in operation.get("parameters", ())
    ]
    content = operation.get("requestBody", {}).get("content", {})
    for body in content.values():
        rows += body["schema"].get("properties", {}).items()
    if rows:
        yield "<table><tr><th>field<th>type<th>default</tr>"
        for name, field in rows:
            cells = (name, _type(field), _default(field))
            yield "<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in cells) + "</tr>"
        yield "</table>"


def _type(field: Schema) -> str:
    """Returns the type of a field in a few words."""
    if "anyOf" in field:
        kinds = [_type(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(kinds)
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return field.get("type", "any")


def _default(field: Schema) -> str:
    default = field.get("default")
    return "" if default is None else str(default)
