"""The host: cores and memory that this process may use, containers included; writing files."""

from __future__ import annotations

import os
import pathlib
import sys

CGROUP = pathlib.Path("/sys/fs/cgroup")
MEMINFO = pathlib.Path("/proc/meminfo")


def cores() -> int:
    """Returns how many cores this process may use, at least 1.

    That is the affinity of the process, or the quota of its control group if that is less.
    """
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    words = _words(CGROUP / "cpu.max")  # "quota period" in microseconds, or "max period"
    if len(words) == 2 and words[0] != "max":
        count = min(count, int(words[0]) // int(words[1]))
    return max(1, count)


def available_memory() -> int | None:
    """Returns how many bytes this process can still take, or None if nothing tells."""
    found = []
    for line in _lines(MEMINFO):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    most, used = _words(CGROUP / "memory.max"), _words(CGROUP / "memory.current")
    if most and used and most[0] != "max":
        # Files that are cached count as used, but make room for others.
        cached = sum(
            int(line.split()[1])
            for line in _lines(CGROUP / "memory.stat")
            if line.startswith("inactive_file ")
        )
        found.append(max(0, int(most[0]) - int(used[0]) + cached))
    return min(found, default=None)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: pathlib.Path) -> list[str]:
    return " ".join(_lines(path)).split()
