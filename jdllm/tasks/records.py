"""Reads task files: JSON lines, plain or gzipped, or one JSON list."""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
from typing import Any


def read(path: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Returns the first `limit` records; raises ValueError for what is not a JSON object."""
    content = pathlib.Path(path).read_bytes()
    if content.startswith(b"\x1f\x8b"):  # gzip
        content = gzip.decompress(content)
    text = content.decode("utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else _lines(path, text, limit)
    found = list(itertools.islice(rows, limit))
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: record {number} is no JSON object")
    return found


def _lines(path: str, text: str, limit: int | None) -> list[Any]:
    found = []
    # Not splitlines, which also splits at U+2028, which JSON keeps in strings.
    lines = (
        (number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    )
    for number, line in itertools.islice(lines, limit):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
    return found


def text_of(row: dict[str, Any], name: str, place: str) -> str:
    """Returns a field that must be text; the error names the field and the record."""
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{place}: field {name!r} must be text")
    return value
