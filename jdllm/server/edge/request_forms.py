"""Other forms of a request that mean the same: HEAD, a slash at the end, a compressed body.

Clients send them by habit: load balancers probe with HEAD, some join an address with a slash, and
some compress what they send. Each form becomes the plain one here, once for all routes.
"""

from __future__ import annotations

import re
import zlib

from starlette import datastructures
from starlette import types as asgi

from jdllm import errors
from jdllm.host import offload
from jdllm.server.edge import responses

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")
GZIP = 16 + zlib.MAX_WBITS
# deflate is zlib's format (RFC 9110, 8.4.1.2); some clients leave its two bytes of header out.
ZLIB, RAW = zlib.MAX_WBITS, -zlib.MAX_WBITS
ENCODINGS = ("gzip", "x-gzip", "deflate")
# No stream of deflate becomes longer by a larger factor, and so many bytes of output take about as
# long as a character takes to tokenise.
MOST_EXPANSION, BYTES_OF_WORK = 1032, 64


def canonical(path: str) -> str:
    """Returns a path without the slash at its end: both name the same route.

    No route has control characters, and patterns of routes would take a line feed at the end.
    """
    return CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", path).removesuffix("/") or "/"


class PlainForm:
    """Answers HEAD as GET without the body, and a path with a slash at its end as without.

    There is no redirect, as clients that follow one do not send their body again.
    """

    def __init__(self, app: asgi.ASGIApp):
        self._app = app

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": canonical(scope["path"])}
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headers_only(message: asgi.Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        await self._app({**scope, "method": "GET"}, receive, headers_only)


class Decompress:
    """Gives the app the plain bytes of a compressed body; there may be at most `max_bytes`.

    The app reads the body, or does not: what is wrong with it is told when it is read.
    """

    def __init__(self, app: asgi.ASGIApp, *, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        encoding = "identity"
        if scope["type"] == "http":
            headers = datastructures.Headers(scope=scope)
            encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", ""):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def plain() -> asgi.Message:
            nonlocal is_read
            if is_read:
                return await receive()
            parts, more = [], True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
            is_read = True
            return {"type": "http.request", "body": await self._plain(b"".join(parts), encoding)}

        await self._app(scope, plain, send)

    async def _plain(self, body: bytes, encoding: str) -> bytes:
        if encoding not in ENCODINGS:
            raise responses.UnsupportedEncoding(
                f"Content-Encoding {errors.quote(encoding)} is not supported; send "
                f"{', '.join(ENCODINGS)} or no encoding"
            )
        if not body:
            return body
        size = min(len(body) * MOST_EXPANSION, self._max_bytes) // BYTES_OF_WORK
        return await offload.off_loop(size, decompressed, body, encoding, self._max_bytes)


def decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Returns the plain bytes, or raises a `RequestError`; stops at more than `max_bytes`."""
    wbits = GZIP
    if encoding == "deflate":
        # RFC 1950: the method is 8, and the two bytes are a multiple of 31.
        is_zlib = body[:1] and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
        wbits = ZLIB if is_zlib else RAW
    inflate = zlib.decompressobj(wbits)
    try:
        plain = inflate.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise errors.RequestError(f"the body is not valid {encoding}: {error}") from error
    if len(plain) > max_bytes:
        raise responses.BodyTooLarge(f"the decompressed body is larger than {max_bytes} bytes")
    if not inflate.eof:
        raise errors.RequestError(f"the body is not valid {encoding}: it ends within its stream")
    if inflate.unused_data:
        raise errors.RequestError(
            f"the body goes on after its first {encoding} stream; send one stream"
        )
    return plain
