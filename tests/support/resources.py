"""Keeps a test run within 4 GB of memory, and says what it took.

Most of what a run would hold is not in use. XLA compiles in many threads, and glibc keeps what they
free: 3.1 GB after one engine of the bundled model is closed, 0.6 GB once it is trimmed. The rest is
what jax's caches hold, compiled programs above all; a module's are of no use to the next one but
for a few, which the persistent cache then loads.
"""

import contextlib
import ctypes
import functools
import gc
import os
import pathlib
import re
import resource
import shutil
import sys
import types
from collections.abc import Iterator

MB, GB = 1 << 20, 1 << 30
LIMIT_BYTES = 4 * GB
GROWTH_BYTES = 256 * MB  # what a run may grow by before it is trimmed: trimming takes 0.1 s
CLEAR_BYTES = GB  # what a run may hold between modules before jax's caches are cleared
SLOWEST = 10


def resident_bytes(process: str = "self") -> int:
    """Returns what a process holds now, 0 where it has ended or the system does not tell."""
    try:
        statm = pathlib.Path("/proc", process, "statm").read_text()
    except OSError:
        return 0
    return int(statm.split()[1]) * resource.getpagesize()


def children_bytes() -> int:
    """Returns what the child processes hold now, servers that tests have started above all.

    Not `RUSAGE_CHILDREN`: a child begins with the peak of the process that started it.
    """
    children: list[str] = []
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended since it was listed
            children += path.read_text().split()
    return sum(map(resident_bytes, children))


def peak_bytes() -> int:
    """Returns the largest resident set that this process has had.

    Not `ru_maxrss` where the system says more: it begins with the peak of the process that started
    this one, which a test run inside a test run would be blamed for.
    """
    with contextlib.suppress(OSError):
        status = pathlib.Path("/proc/self/status").read_text()
        if found := re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE):
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cpu_s() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


_CACHED = type(functools.cache(len))


class Resources:
    """What the tests of a run take. A plugin of pytest."""

    def __init__(self) -> None:
        self._trimmed_bytes = resident_bytes()
        self._with_children_bytes = 0
        self._cpu_s: dict[str, float] = {}
        self._peak_bytes: dict[str, int] = {}

    @contextlib.contextmanager
    def of_module(self, module: str) -> Iterator[None]:
        """Counts a test of the module: its CPU time, and how far it raised the peak."""
        began = cpu_s()
        yield
        self._cpu_s[module] = self._cpu_s.get(module, 0.0) + cpu_s() - began
        self._peak_bytes[module] = peak_bytes()

    def after_test(self, *, ended: types.ModuleType | None) -> None:
        """Notes what is held; gives memory back to the system, if much has gathered.

        `ended` is the module whose last test it was: nobody needs what its functions have cached.
        """
        for function in vars(ended).values() if ended else ():
            if isinstance(function, _CACHED) and function.__module__ == ended.__name__:
                function.cache_clear()
        children = children_bytes()
        if children:
            together = children + resident_bytes()
            self._with_children_bytes = max(self._with_children_bytes, together)
        if resident_bytes() > self._trimmed_bytes + GROWTH_BYTES:
            self._trim()
        if ended and resident_bytes() > CLEAR_BYTES and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
            self._trim()

    def _trim(self) -> None:
        gc.collect()
        with contextlib.suppress(AttributeError):  # a C library that has no such function
            ctypes.CDLL(None).malloc_trim(0)
        self._trimmed_bytes = resident_bytes()

    @property
    def has_run(self) -> bool:
        """Whether there was a test."""
        return bool(self._cpu_s)

    @property
    def is_too_large(self) -> bool:
        """Where there is a GPU its driver takes part of the memory, and the limit says nothing."""
        most = max(peak_bytes(), self._with_children_bytes)
        return most > LIMIT_BYTES and shutil.which("nvidia-smi") is None

    def summary(self) -> Iterator[str]:
        """Yields lines for the end of a run."""
        yield (
            f"memory: {peak_bytes() / GB:.1f} GB at most, {self._with_children_bytes / GB:.1f} GB "
            f"with child processes; the limit is {LIMIT_BYTES / GB:.0f} GB"
        )
        if self.is_too_large:
            yield "FAILED: the run held more memory than its limit"
        yield f"CPU time: {cpu_s():.0f} s; most of it, with the peak so far:"
        slowest = sorted(self._cpu_s, key=self._cpu_s.__getitem__, reverse=True)[:SLOWEST]
        for module in slowest:
            peak = self._peak_bytes[module] / GB
            yield f"  {self._cpu_s[module]:6.1f} s  {peak:4.1f} GB  {module}"
