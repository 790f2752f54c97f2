"""What a traced program is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a program and of all programs within it: branches, loops, calls."""
    for one in jaxpr.eqns:
        yield one
        for value in one.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)
