"""Bytes that are no HTTP, or HTTP of a kind that clients do not send."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import struct
import time

from support.fuzz import checks, wire

RESET_AT_ONCE = struct.pack("ii", 1, 0)
HEALTH = b"GET /health HTTP/1.1\r\nHost: fuzz\r\n\r\n"


@dataclasses.dataclass(frozen=True)
class Sent:
    """What is sent on a connection of its own, and how many answers of which kind must come.

    With `statuses` each answer is of one of them. `num_replies` None: none or any number.
    `waits_s` passes before the client goes, if it reads no answer.
    """

    raw: bytes
    statuses: frozenset[int] = checks.STATUSES
    num_replies: int | None = None
    ends: str = "close"
    waits_s: float = 0.0


def random_one(post: bytes, rng: random.Random) -> Sent:
    """Returns one of many kinds of trouble; `post` is a request with a body that is served."""
    head, _, body = post.partition(b"\r\n\r\n")
    first, _, rest = head.partition(b"\r\n")
    without_length = b"\r\n".join(
        line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")
    )

    def lengths(value: bytes) -> bytes:
        return without_length + b"\r\nContent-Length: " + value + b"\r\n\r\n" + body

    def with_header(line: bytes) -> bytes:
        return first + b"\r\n" + line + b"\r\n" + rest + b"\r\n\r\n" + body

    bad, served = frozenset({400}), frozenset({200, 503})
    cut = rng.randrange(1, len(post))
    noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
    half = len(body) // 2
    chunked = without_length + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    coded = without_length + b"\r\nTransfer-Encoding: gzip\r\n\r\n"
    in_chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
        half, body[:half], len(body) - half, body[half:],
    )  # fmt: skip
    without_body = b" HTTP/1.1\r\nHost: x\r\n\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: "
    brief, long = rng.choice([0, 0, 0.05]), rng.choice([0, 0.02, 0.2])
    kinds = {
        "part of a request": Sent(post[:cut], waits_s=brief),
        "part of one, reset": Sent(post[:cut], ends="reset"),
        "part of one, half closed": Sent(post[:cut], ends="half"),
        "half closed": Sent(post, ends="half"),
        "closed": Sent(post, ends="close"),
        "reset": Sent(post, ends="reset", waits_s=long),
        "noise": Sent(noise, waits_s=0.01),
        "lines of noise": Sent(noise + b"\r\n\r\n", ends="half"),
        "TLS": Sent(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise, waits_s=0.01),
        "HTTP/2": Sent(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bad | {401}, 1, "read"),
        "a negative length": Sent(lengths(b"-1"), bad, 1, "read"),
        "a length with an exponent": Sent(lengths(b"1e3"), bad, 1, "read"),
        "a length of 30 digits": Sent(lengths(b"9" * 30), bad, 1, "read"),
        "a length over the limit": Sent(lengths(b"99999999"), frozenset({413}), 1, "half"),
        "two lengths": Sent(lengths(b"%d\r\nContent-Length: 5" % len(body)), bad, 1, "read"),
        "half the length": Sent(lengths(b"%d" % half), ends="half"),
        "chunks": Sent(chunked + in_chunks, served, 1, "read"),
        "no chunk": Sent(chunked + b"zz\r\n" + body, waits_s=0.02),
        "a chunk without end": Sent(chunked + b"f" * 20 + b"\r\n" + body, waits_s=0.02),
        "chunks without end": Sent(chunked + in_chunks[:-7], ends="half"),
        "an unknown coding": Sent(coded + body, waits_s=0.02),
        "five at once": Sent(HEALTH * 5, frozenset({200}), 5, "read"),
        "noise behind": Sent(HEALTH + noise + b"\r\n\r\n", frozenset({200, 400}), ends="half"),
        "two at once": Sent(post + HEALTH, served, 2, "read"),
        "a long header": Sent(with_header(b"X-Long: " + b"a" * 100_000), bad, ends="half"),
        "many headers": Sent(with_header(b"\r\n".join([b"X-A: b"] * 500)), served, 1, "read"),
        "a zero byte": Sent(with_header(b"X-Bad: a\x00b"), bad, 1, "read"),
        "a name with a space": Sent(with_header(b"X Bad: a"), bad, 1, "read"),
        "a strange id": Sent(with_header(b"X-Request-Id: a\tb \xff"), served, 1, "read"),
        "a long id": Sent(with_header(b"X-Request-Id: " + b"a" * 5000), served, 1, "read"),
        "100-continue": Sent(with_header(b"Expect: 100-continue"), served, 1, "read"),
        "a web socket": Sent(with_header(upgrade + b"websocket"), served, 1, "read"),
        "h2c": Sent(with_header(upgrade + b"h2c"), served, 1, "read"),
        "a second key": Sent(with_header(b"Authorization: Bearer \xff\xfe"), ends="half"),
        "a long path": Sent(b"GET /" + b"a" * 60_000 + without_body, bad | {401}, 1, "read"),
        "a strange path": Sent(b"GET /%00%0a%ff" + without_body, frozenset({401}), 1, "read"),
        "a whole address": Sent(b"GET http://a/health" + without_body, ends="half"),
        "HTTP/1.0": Sent(b"GET /health HTTP/1.0\r\n\r\n", frozenset({200}), 1, "read"),
        "no host": Sent(b"GET /health HTTP/1.1\r\n\r\n", bad, 1, "read"),
        "HTTP/0.9": Sent(b"GET /health\r\n\r\n", waits_s=0.01),
        "empty lines": Sent(b"\r\n\r\n\r\n" + HEALTH, frozenset({200, 400}), ends="half"),
        "nothing": Sent(b"", waits_s=brief),
        "an unread stream": Sent(post * 20, waits_s=2 * long),
    }
    return rng.choice([*kinds.values()])


def send(port: int, sent: Sent) -> list[wire.Reply]:
    """Sends and reads what there is to read; checks the number of answers and their statuses."""
    replies: list[wire.Reply] = []
    with wire.connect(port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent.raw)
        time.sleep(sent.waits_s)
        if sent.ends == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
        if sent.ends == "half":
            connection.shutdown(socket.SHUT_WR)
        if sent.ends in ("half", "read"):
            replies = wire.replies(connection, sent.num_replies or 10)
    if sent.ends == "read" and sent.num_replies is not None:
        checks.need(
            len(replies) == sent.num_replies or any(r.status in (400, 503) for r in replies),
            f"{len(replies)} answers of {sent.num_replies}",
        )
    for reply in replies:
        checks.need(reply.status in sent.statuses, f"{reply.status}, not one of {sent.statuses}")
    return replies
