"""Leaves most cases of a large product to the campaign."""

from collections.abc import Iterable
from typing import Any

import pytest


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Returns the values for `parametrize`; all but each `step`-th are marked `campaign`."""
    return [
        value
        if i % step == 0
        else pytest.param(*value, marks=pytest.mark.campaign)
        if isinstance(value, tuple)
        else pytest.param(value, marks=pytest.mark.campaign)
        for i, value in enumerate(values)
    ]
