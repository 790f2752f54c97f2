"""What lives as long as the process: `functools.cache` ends with a folder, see `resources`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


def once(make: Callable[[], Made]) -> Callable[[], Made]:
    """Returns a function that calls `make` the first time and then gives what that returned."""
    made: list[Made] = []

    @functools.wraps(make)
    def get() -> Made:
        if not made:
            made.append(make())
        return made[0]

    return get
