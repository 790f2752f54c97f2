"""Bytes that are no HTTP, or HTTP of a kind that clients do not send."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import time

from support.fuzz import checks, wire

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

    bad = frozenset({400})
    cut = rng.randrange(1, len(post))
    noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
    half = len(body) // 2
    chunked = without_length + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    in_chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
        half, body[:half], len(body) - half, body[half:],
    )  # fmt: skip
    kinds = [
        lambda: Sent(post[:cut], waits_s=rng.choice([0, 0, 0.05])),
        lambda: Sent(post[:cut], ends="reset"),
        lambda: Sent(post[:cut], ends="half"),
        lambda: Sent(post, ends="half"),
        lambda: Sent(post, ends="close"),
        lambda: Sent(post, ends="reset", waits_s=rng.choice([0, 0.02, 0.2])),
        lambda: Sent(noise, waits_s=0.01),
        lambda: Sent(noise + b"\r\n\r\n", statuses=bad),
        lambda: Sent(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise, waits_s=0.01),
        lambda: Sent(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bad, 1, "read"),
        lambda: Sent(lengths(b"-1"), bad, 1, "read"),
        lambda: Sent(lengths(b"1e3"), bad, 1, "read"),
        lambda: Sent(lengths(b"9" * 30), bad, 1, "read"),
        lambda: Sent(lengths(b"99999999"), frozenset({413}), 1, "half"),
        lambda: Sent(lengths(b"%d\r\nContent-Length: 5" % len(body)), bad, 1, "read"),
        lambda: Sent(lengths(b"%d" % half), checks.STATUSES, None, "half"),
        lambda: Sent(chunked + in_chunks, frozenset({200, 503}), 1, "read"),
        lambda: Sent(chunked + b"zz\r\n" + body, waits_s=0.02),
        lambda: Sent(chunked + b"ffffffffffffffffffff\r\n" + body, waits_s=0.02),
        lambda: Sent(chunked + in_chunks[:-7], ends="half"),
        lambda: Sent(without_length + b"\r\nTransfer-Encoding: gzip\r\n\r\n" + body, waits_s=0.02),
        lambda: Sent(HEALTH * 5, frozenset({200}), 5, "read"),
        lambda: Sent(HEALTH + noise + b"\r\n\r\n", frozenset({200, 400}), None, "half"),
        lambda: Sent(post + HEALTH, checks.STATUSES, 2, "read"),
        lambda: Sent(with_header(b"X-Long: " + b"a" * 100_000), bad, None, "half"),
        lambda: Sent(with_header(b"\r\n".join([b"X-A: b"] * 500)), frozenset({200, 503}), 1, "read"),
        lambda: Sent(with_header(b"X-Bad: a\x00b"), bad, 1, "read"),
        lambda: Sent(with_header(b"X Bad: a"), bad, 1, "read"),
        lambda: Sent(with_header(b"X-Request-Id: a\tb \xff"), frozenset({200, 503}), 1, "read"),
        lambda: Sent(with_header(b"X-Request-Id: " + b"a" * 5000), frozenset({200, 503}), 1, "read"),
        lambda: Sent(with_header(b"Expect: 100-continue"), frozenset({200, 503}), 1, "read"),
        lambda: Sent(with_header(b"Connection: Upgrade\r\nUpgrade: websocket"), waits_s=0.02),
        lambda: Sent(with_header(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c"), waits_s=0.02),
        lambda: Sent(with_header(b"Authorization: Bearer \xff\xfe"), ends="half"),
        lambda: Sent(b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", bad | {401}, 1, "read"),
        lambda: Sent(b"GET /%00%0a%ff%e2%80%a8 HTTP/1.1\r\nHost: x\r\n\r\n", frozenset({401}), 1, "read"),
        lambda: Sent(b"GET http://a/health HTTP/1.1\r\nHost: x\r\n\r\n", checks.STATUSES, 1, "read"),
        lambda: Sent(b"GET /health HTTP/1.0\r\n\r\n", frozenset({200}), 1, "read"),
        lambda: Sent(b"GET /health HTTP/1.1\r\n\r\n", bad, 1, "read"),
        lambda: Sent(b"GET /health\r\n\r\n", waits_s=0.01),
        lambda: Sent(b"\r\n\r\n\r\n" + HEALTH, frozenset({200, 400}), None, "half"),
        lambda: Sent(b"", waits_s=rng.choice([0, 0.05])),
    ]  # fmt: skip
    return rng.choice(kinds)()


def send(port: int, sent: Sent) -> list[wire.Reply]:
    """Sends and reads what there is to read; checks the number of answers and their statuses."""
    replies: list[wire.Reply] = []
    with contextlib.closing(wire.connect(port)) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent.raw)
            time.sleep(sent.waits_s)
            if sent.ends == "reset":
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
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
