"""The API keys of a server, and which of them a request carries.

A key stands in an option or in a file. The command line is visible to every user of the machine
(`ps`), a file is not. A key file holds one key per line; empty lines and lines that begin with
`#` are skipped. Files are read once, at start.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import pathlib
import stat
from collections.abc import Mapping

from jdllm import errors
from jdllm.options import config
from jdllm.server.edge import request_context

logger = logging.getLogger(__name__)

MAX_KEY_FILE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """The keys for all routes, and those of the administrator; () asks for none."""

    user: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()

    def caller(self, headers: Mapping[str, str]) -> request_context.Caller | None:
        """Returns whose key the request has, None for no key or a wrong one.

        The time this takes reveals nothing of the keys.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode() if scheme.lower() == "bearer" else b""
        # Lists, not generators: every key is compared, without an early exit.
        is_admin = any([hmac.compare_digest(given, key) for key in self.admin])
        places = [place for place, key in enumerate(self.user) if hmac.compare_digest(given, key)]
        if is_admin:
            return request_context.Caller("admin", is_admin=True)
        return request_context.Caller(f"key {places[0]}") if places else None

    def may_abort_all(self, caller: request_context.Caller) -> bool:
        """Says whether the requests of all others are the caller's to abort.

        They are the administrator's. If there is no admin key, and at most one other, everybody
        here is the same caller.
        """
        return caller.is_admin or (not self.admin and len(self.user) <= 1)


def load(server_config: config.ServerConfig) -> Keys:
    """Returns the keys that the options name; a wrong file is a ConfigError."""
    return Keys(
        user=_keys("api_key_file", server_config.api_key, server_config.api_key_file),
        admin=_keys(
            "admin_api_key_file", server_config.admin_api_key, server_config.admin_api_key_file
        ),
    )


def _keys(name: str, key: str | None, path: str | None) -> tuple[bytes, ...]:
    if path is None:
        return () if key is None else (key.encode(),)
    return tuple(dict.fromkeys(_read(name, pathlib.Path(path))))


def _read(name: str, path: pathlib.Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            content = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise errors.ConfigError(f"{name}={str(path)!r} cannot be read: {error.strerror}") from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise errors.ConfigError(f"{name}={str(path)!r} is larger than {MAX_KEY_FILE_BYTES} bytes")
    if mode & stat.S_IROTH:
        logger.warning("%s: every user of this machine may read %s; chmod 600 it", name, path)
    found: list[bytes] = []
    for number, line in enumerate(content.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        # The message must not show the line: it is a secret.
        if not config.is_key(key.decode(errors="replace")):
            raise errors.ConfigError(
                f"{name}={str(path)!r}: line {number} is no key; a key is printable ASCII "
                "without spaces"
            )
        found.append(key)
    if not found:
        raise errors.ConfigError(f"{name}={str(path)!r} holds no key")
    return found
