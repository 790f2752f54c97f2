"""Counts how much Python does in a call, which no busy machine changes."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def bytecodes(function: Callable[[], object]) -> int:
    """Returns how many bytecodes a call runs, with all that it calls in this thread."""
    count, before = 0, sys.gettrace()

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
