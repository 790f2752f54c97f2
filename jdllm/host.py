"""The host: cores and memory that this process may use, containers included; writing files."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import tempfile

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


def make_writable(folder: pathlib.Path) -> None:
    """Makes a folder where there is none; an OSError if nothing can be written there.

    Commands ask before work that takes long, whose results they would lose.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Its name is taken away again at once; only writing tells whether one may write.
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_writable_above(path: pathlib.Path) -> None:
    """Raises an OSError if `path` could not be made; makes no folder."""
    above = path.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    make_writable(above)


def replace_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step: a reader sees the old or the new content, never a part.

    Raises an OSError where that fails, and then leaves what was there.
    """
    scratch = path.with_suffix(".part")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
