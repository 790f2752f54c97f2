"""Keeps a test run within 4 GB of memory, and says what it took.

Most of what a run would hold is not in use. XLA compiles in many threads, and glibc keeps what they
free: 3.1 GB after one engine of the bundled model is closed, 0.6 GB once it is trimmed; processes
that are started from here have few of its arenas (1.26 GB of a server in place of 1.38). The rest
is what jax's caches hold, compiled programs above all; a module's are of no use to the next one but
for a few, which the persistent cache then loads. And what functions of tests and of `support` cache
(goldens, tiny models, programs) is of no use once their module, or the folder, has ended.

A run may be several worker processes of pytest-xdist. Each gives its own memory back; the process
that starts them sees what all hold together, and adds up the CPU time that they report.
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
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MB, GB = 1 << 20, 1 << 30
LIMIT_BYTES = 4 * GB
# What a process may grow by before it is trimmed, which takes 0.1 s, and at the end of a module,
# before jax's caches are cleared, which takes half a second, and what comes next longer.
GROWTH_BYTES = 128 * MB
WATCH_S = 0.5
SLOWEST = 10
NAMED = 4


def resident_bytes(process: str = "self") -> int:
    """Returns what a process holds now, 0 where it has ended or the system does not tell."""
    try:
        statm = pathlib.Path("/proc", process, "statm").read_text()
    except OSError:
        return 0
    return int(statm.split()[1]) * resource.getpagesize()


def proportional_bytes(process: str = "self") -> int:
    """Returns what a process holds now; of a page that several share it has its part.

    Counting takes 0.1 s for each GB, so it is for sums of processes that seem to hold too much:
    those of Ray, say, share the libraries and the memory in which they hand over data.
    """
    try:
        rollup = pathlib.Path("/proc", process, "smaps_rollup").read_text()
    except OSError:  # the process has ended, or it is not ours
        return resident_bytes(process)
    found = re.search(r"^Pss:\s*(\d+) kB$", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else resident_bytes(process)


def tree_bytes(process: str = "self", bytes_of: Callable[[str], int] = resident_bytes) -> int:
    """Returns what a process and all that it has started hold now: workers, servers of tests.

    Not `RUSAGE_CHILDREN`: a child begins with the peak of the process that started it.
    """
    children: list[str] = []
    for path in pathlib.Path("/proc", process, "task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended since it was listed
            children += path.read_text().split()
    return bytes_of(process) + sum(tree_bytes(child, bytes_of) for child in children)


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


def limit_arenas() -> None:
    """Has processes that start from here, workers too, keep less of what their threads free."""
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")


_CACHED = type(functools.cache(len))
_SUPPORT = __name__.rpartition(".")[0] + "."


def clear_caches(module: types.ModuleType) -> None:
    """Forgets what functions and methods of a module, not of those that it imports, have cached."""
    for found in list(vars(module).values()):
        own = vars(found).values() if isinstance(found, type) else [found]
        for function in own:
            if isinstance(function, _CACHED) and function.__module__ == module.__name__:
                function.cache_clear()


def clear_caches_of_support() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(_SUPPORT):
            clear_caches(module)


class Resources:
    """What the tests of a run take."""

    def __init__(self) -> None:
        self._trimmed_bytes = resident_bytes()
        self._cleared_bytes = resident_bytes()
        self._last_bytes = self._together_bytes = 0
        # Tests that run now, and those that ran at some time before and after the last look.
        self._running: set[str] = set()
        self._ran_before: set[str] = set()
        self._ran: set[str] = set()
        self._at_most: set[str] = set()
        self._cpu_s: dict[str, float] = {}
        self._peak_bytes: dict[str, int] = {}
        self._reports: list[Mapping[str, Any]] = []

    def watch(self) -> None:
        """Watches from now on what the process holds together with all that it starts."""

        def watch() -> None:
            while True:
                self.look()
                time.sleep(WATCH_S)

        threading.Thread(target=watch, name="memory", daemon=True).start()

    def look(self) -> None:
        """Notes what all have held twice in a row.

        A child that is just being made seems to hold what its parent does, for a moment.
        """
        before, self._last_bytes = self._last_bytes, tree_bytes()
        if self._last_bytes > LIMIT_BYTES:
            self._last_bytes = tree_bytes(bytes_of=proportional_bytes)
        held = min(before, self._last_bytes)
        ran, self._ran = self._ran, set(self._running)
        if held > self._together_bytes:
            self._together_bytes = held
            self._at_most = self._ran_before | ran
        self._ran_before = ran

    def begin(self, test: str) -> None:
        """Notes that a test runs, in this process or in a worker."""
        self._running.add(test)
        self._ran.add(test)

    def end(self, test: str) -> None:
        self._running.discard(test)

    @contextlib.contextmanager
    def of_module(self, module: str) -> Iterator[None]:
        """Counts a test of the module: its CPU time, and how far it raised the peak."""
        began = cpu_s()
        yield
        self._cpu_s[module] = self._cpu_s.get(module, 0.0) + cpu_s() - began
        self._peak_bytes[module] = peak_bytes()

    def after_test(self, *, ended: types.ModuleType | None, folder_ended: bool) -> None:
        """Gives memory back to the system, if much has gathered.

        `ended` is the module whose last test it was.
        """
        if ended:
            clear_caches(ended)
        if folder_ended:
            clear_caches_of_support()
        held = resident_bytes()
        if ended and held > self._cleared_bytes + GROWTH_BYTES:
            if "jax" in sys.modules:
                sys.modules["jax"].clear_caches()
            self._trim()
            self._cleared_bytes = self._trimmed_bytes
        elif held > self._trimmed_bytes + GROWTH_BYTES:
            self._trim()
        self._cleared_bytes = min(self._cleared_bytes, self._trimmed_bytes)

    def _trim(self) -> None:
        gc.collect()
        with contextlib.suppress(AttributeError):  # a C library that has no such function
            ctypes.CDLL(None).malloc_trim(0)
        self._trimmed_bytes = resident_bytes()

    def report(self) -> dict[str, Any]:
        """Returns what this worker has taken, in values that can be sent."""
        return {
            "peak_bytes": peak_bytes(),
            "cpu_s": cpu_s(),
            "cpu_s_of": self._cpu_s,
            "peak_bytes_of": self._peak_bytes,
        }

    def add(self, report: Mapping[str, Any]) -> None:
        """Adds the report of a worker. Its modules are its own: a file's tests run in one."""
        self._reports.append(report)
        self._cpu_s |= report["cpu_s_of"]
        self._peak_bytes |= report["peak_bytes_of"]

    @property
    def has_run(self) -> bool:
        """Whether there was a test."""
        return bool(self._cpu_s)

    @property
    def most_bytes(self) -> int:
        """The most that the run has held: sampled, or the peak of one process, which is exact."""
        alone = (one["peak_bytes"] for one in self._reports)
        return max(peak_bytes(), self._together_bytes, *alone)

    @property
    def is_too_large(self) -> bool:
        """Where there is a GPU its driver takes part of the memory, and the limit says nothing."""
        return self.most_bytes > LIMIT_BYTES and shutil.which("nvidia-smi") is None

    def summary(self) -> Iterator[str]:
        """Yields lines for the end of a run."""
        peaks = [one["peak_bytes"] for one in self._reports] or [peak_bytes()]
        yield (
            f"memory: {self.most_bytes / GB:.1f} GB at most with child processes, "
            f"{' and '.join(f'{peak / GB:.1f}' for peak in peaks)} GB without; "
            f"the limit is {LIMIT_BYTES / GB:.0f} GB"
        )
        if self.is_too_large:
            yield "FAILED: the run held more memory than its limit"
        if self._at_most:
            tests = " and ".join(sorted(self._at_most)[:NAMED])
            tests += " and others" if len(self._at_most) > NAMED else ""
            yield f"most at a time, {self._together_bytes / GB:.1f} GB, in {tests}"
        # Workers that have ended are children: their time is in their reports alone.
        own = sum(os.times()[:2]) if self._reports else cpu_s()
        cpu = own + sum(one["cpu_s"] for one in self._reports)
        yield f"CPU time: {cpu:.0f} s; most of it, with the peak so far:"
        slowest = sorted(self._cpu_s, key=self._cpu_s.__getitem__, reverse=True)[:SLOWEST]
        for module in slowest:
            peak = self._peak_bytes[module] / GB
            yield f"  {self._cpu_s[module]:6.1f} s  {peak:4.1f} GB  {module}"
