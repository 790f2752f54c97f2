"""`/`: a page in which one sees the model denoise, for a browser.

Its files are package data and load nothing from elsewhere. The page uses the public API only, so it
needs the API key where one is set, and its own files, which hold no secret, need none.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

FOLDER = pathlib.Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            # Pictures come inside of answers; a page can read them without asking another server.
            "img-src 'self' blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FILES = {
    ("/" if path.name == "index.html" else f"/playground/{path.name}"): path
    for path in sorted(FOLDER.iterdir())
    if path.suffix in MEDIA_TYPES
}
# What needs no API key, and is shown while the server starts.
PATHS = frozenset(FILES)


def _shows(path: pathlib.Path) -> Callable[[requests.Request], starlette_responses.Response]:
    content, media_type = path.read_bytes(), MEDIA_TYPES[path.suffix]
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}

    def show(request: requests.Request) -> starlette_responses.Response:
        # RFC 9110, 13.1.2: a list of tags, weak ones too, or "*".
        known = {
            one.strip().removeprefix("W/")
            for one in request.headers.get("if-none-match", "").split(",")
        }
        if known & {tag, "*"}:
            return starlette_responses.Response(status_code=304, headers=headers)
        return starlette_responses.Response(content, headers=headers, media_type=media_type)

    return show


def router() -> fastapi.APIRouter:
    """Returns the routes of the page and of its files."""
    made = fastapi.APIRouter()
    for address, path in FILES.items():
        made.add_route(address, _shows(path), methods=["GET"], include_in_schema=False)
    return made
