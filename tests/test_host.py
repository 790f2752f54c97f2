"""Cores and memory of the host, as its files tell them."""

from __future__ import annotations

import os

import pytest

from jdllm.host import resources
from jdllm.runner.launch import executables

GB = 1 << 30


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes files of the control group, and /proc/meminfo; without them nothing is known."""
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    monkeypatch.setattr(resources, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / name.replace("_", ".")).write_text(text)

    return write


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, 16),
        ("max 100000\n", 16),
        ("400000 100000\n", 4),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 16),
    ],
)
def test_cores_are_those_that_the_process_may_use(files, quota, cores):
    if quota is not None:
        files(cpu_max=quota)
    assert resources.cores() == cores


def test_memory_is_what_the_machine_and_the_container_leave(files):
    assert resources.available_memory() is None
    files(meminfo=f"MemTotal: 99999 kB\nMemAvailable: {8 * GB // 1024} kB\n")
    assert resources.available_memory() == 8 * GB
    files(memory_max="max\n", memory_current=f"{GB}\n")
    assert resources.available_memory() == 8 * GB
    files(memory_max=f"{4 * GB}\n", memory_stat=f"anon 5\ninactive_file {GB // 2}\n")
    assert resources.available_memory() == 3 * GB + GB // 2


@pytest.mark.parametrize(
    ("available", "threads"), [(None, 16), (128 * GB, 16), (20 * GB, 10), (GB, 1), (0, 1)]
)
def test_one_program_per_core_is_compiled_at_a_time_memory_permitting(files, available, threads):
    if available is not None:
        files(meminfo=f"MemAvailable: {available // 1024} kB\n")
    assert executables.compile_threads() == threads


def test_this_machine_has_cores():
    assert 1 <= resources.cores() <= (os.cpu_count() or 1)
