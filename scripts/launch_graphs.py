"""Which parts of a compiled launch are CUDA graphs; for `count_kernels.py`.

XLA runs a sequence of thunks: a kernel, a copy, a loop, a call of a library. What it can capture it
puts into command buffers, which are CUDA graphs. A launch that is one graph costs the host one
call. What is no part of a graph the host starts itself, and the rounds of a loop around it, too.

A `DynamicSliceFusion` is a mere copy of a slice that moves. Inside a loop it keeps this loop and
those around it from being captured; a graph that contains one is updated at every use.
"""

from __future__ import annotations

import collections
import dataclasses
import re

GRAPH, LOOP, MOVING_COPY = "CommandBuffer", "While", "DynamicSliceFusion"
_THUNK = re.compile(r"( *)\d+: k(\w+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Thunk:
    """One thunk, and those inside it."""

    kind: str
    inside: list[Thunk]

    def count(self, kind: str) -> int:
        """Returns how many thunks of a kind this one holds, at any depth."""
        return sum((one.kind == kind) + one.count(kind) for one in self.inside)


def parse(text: str) -> list[Thunk]:
    """Returns the thunks of a dump, in which one is indented by its depth.

    A line is `028: kWhile ...`, a line of its body `    000: kCommandBuffer ...`.
    """
    whole = Thunk("launch", [])
    around = [(-1, whole)]
    for line in text.splitlines():
        if found := _THUNK.match(line):
            depth, thunk = len(found.group(1)), Thunk(found.group(2), [])
            while around[-1][0] >= depth:
                around.pop()
            around[-1][1].inside.append(thunk)
            around.append((depth, thunk))
    return whole.inside


def describe(thunks: list[Thunk]) -> list[str]:
    """Returns a line that says whether a launch is one graph; if not, what the host starts.

    Lines on the loops among it follow.
    """
    if [one.kind for one in thunks] == [GRAPH]:
        return [f"one CUDA graph: yes{_copies(thunks[0])}"]
    return [f"one CUDA graph: no, the host starts {_counts(thunks)}", *_loops(thunks, depth=1)]


def _counts(thunks: list[Thunk]) -> str:
    counts = collections.Counter(one.kind for one in thunks)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def _copies(thunk: Thunk) -> str:
    count = thunk.count(MOVING_COPY)
    return f"; copies of moving slices: {count}" if count else ""


def _loops(thunks: list[Thunk], depth: int) -> list[str]:
    lines = []
    for one in thunks:
        if one.kind == LOOP:
            lines.append(
                f"{'    ' * depth}in each round of a loop {_counts(one.inside)}{_copies(one)}"
            )
            lines += _loops(one.inside, depth + 1)
    return lines
