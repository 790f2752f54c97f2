"""The guard of memory sees all processes of a test run, and adds up what workers report."""

import os
import signal
import subprocess
import sys
import types

import pytest
from support import once, resources, waiting
from support.resources import GB, MB


def report(module, peak_gb):
    return {
        "peak_bytes": round(peak_gb * GB),
        "cpu_s": 7.0,
        "cpu_s_of": {module: 5.0},
        "peak_bytes_of": {module: round(peak_gb * GB)},
    }


@pytest.mark.parametrize(("together_gb", "too_large"), [(3.9, False), (4.1, True)])
def test_workers_are_judged_together(together_gb, too_large, monkeypatch):
    monkeypatch.setattr(resources, "tree_bytes", lambda **_: round(together_gb * GB))
    monkeypatch.setattr(resources, "peak_bytes", lambda: GB // 2)
    monkeypatch.setattr(resources.shutil, "which", lambda _: None)
    run = resources.Resources()
    assert not run.has_run and not run.is_too_large
    run.look()
    assert run.most_bytes == GB // 2, "it may be a moment"
    run.look()
    run.add(report("a.py", 1.0))
    run.add(report("b.py", 1.25))
    assert run.has_run and run.is_too_large == too_large
    text = "\n".join(run.summary())
    assert f"{together_gb} GB at most with child processes, 1.0 and 1.2 GB without" in text
    assert "a.py" in text and "b.py" in text
    assert ("FAILED" in text) == too_large


def test_the_largest_sample_is_that_of_the_tests_around_it(monkeypatch):
    samples = iter([1, 3, 3, 2, 1, 1])
    monkeypatch.setattr(resources, "tree_bytes", lambda **_: next(samples) * GB)
    run = resources.Resources()
    run.begin("a.py::test_early")
    run.look()
    run.end("a.py::test_early")
    run.look()
    run.begin("b.py::test_long")
    run.begin("a.py::test_short")
    run.end("a.py::test_short")
    run.look()
    run.end("b.py::test_long")
    run.begin("a.py::test_late")
    for _ in range(3):
        run.look()
    (line,) = (one for one in run.summary() if "at a time" in one)
    assert (
        line
        == "most at a time, 3.0 GB, in a.py::test_early and a.py::test_short and b.py::test_long"
    )


def test_a_peak_between_two_samples_counts(monkeypatch):
    monkeypatch.setattr(resources, "tree_bytes", lambda **_: GB)
    monkeypatch.setattr(resources.shutil, "which", lambda _: None)
    run = resources.Resources()
    run.add(report("a.py", 5.5))
    assert run.is_too_large
    assert "5.5 GB at most" in "\n".join(run.summary())


def test_children_of_children_are_counted():
    inner = "import time; held = bytearray(b'1' * (150 << 20)); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], start_new_session=True) as process:
        try:
            waiting.wait_until(lambda: resources.tree_bytes(str(process.pid)) > 150 * MB)
            assert resources.resident_bytes(str(process.pid)) < 100 * MB
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_what_a_worker_sends_is_what_is_added():
    run = resources.Resources()
    with run.of_module("a.py"):
        pass
    assert run.report().keys() == report("a.py", 1).keys()
    assert run.report()["cpu_s_of"].keys() == {"a.py"}


def test_pages_that_processes_share_count_once():
    shared = "import mmap, os, time; held = mmap.mmap(-1, 150 << 20)"
    shared += "; [held.write(b'1' * (1 << 20)) for _ in range(150)]; os.fork()"
    shared += "; held[::4096]; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", shared], start_new_session=True) as process:
        try:
            one = str(process.pid)
            waiting.wait_until(lambda: resources.tree_bytes(one) > 300 * MB)
            proportional = resources.tree_bytes(one, resources.proportional_bytes)
            assert 140 * MB < proportional < 250 * MB
        finally:
            os.killpg(process.pid, signal.SIGKILL)


CACHES = """
import functools

@functools.cache
def model():
    return object()

class Golden:
    @functools.cache
    def arrays(self):
        return object()

golden = Golden()
"""


def test_caches_of_tests_end_with_their_module_and_those_of_support_with_the_folder(monkeypatch):
    own, support = types.ModuleType("test_one"), types.ModuleType("support.one")
    for module in (own, support):
        exec(CACHES, vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    own.imported, own.Imported = support.model, support.Golden
    open_engine = once.once(object)

    def cached():
        of = [(module.model(), module.golden.arrays()) for module in (own, support)]
        return (*of, open_engine())

    first, run = cached(), resources.Resources()
    run.after_test(ended=None, folder_ended=False)
    assert cached() == first
    run.after_test(ended=own, folder_ended=False)
    second = cached()
    assert second[1:] == first[1:] and not set(second[0]) & set(first[0])
    run.after_test(ended=own, folder_ended=True)
    assert not set(cached()[1]) & set(first[1]) and open_engine() is first[2]
