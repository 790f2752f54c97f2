"""Hostile programs: each fails, ends in time, and leaves nothing behind."""

import pathlib
import sys
import tempfile
import time

import pytest

from jdllm import errors
from jdllm.eval import sandbox

TIME_S = 2.0
ENDS_WITHIN_S = 20  # far more than the limit: the machine may be busy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")


@pytest.fixture(scope="module")
def box():
    try:
        return sandbox.Sandbox(
            limits=sandbox.Limits(time_s=TIME_S, memory_bytes=256 * sandbox.MEBIBYTE)
        )
    except errors.ConfigError as error:
        pytest.skip(str(error))


HOSTILE = {
    "endless loop": ("while True: pass", "ran longer than"),
    "sleeps": ("import time\ntime.sleep(99)", "ran longer than"),
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "threads": ("import threading\nthreading.Thread(target=print).start()", "thread"),
    "starts a program": ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
    "memory hog": ("x = []\nwhile True: x.append('a' * 10**6)", "MemoryError"),
    "huge file": ("open('f', 'w').write('a' * (17 << 20))", "File too large"),
    "many files": (
        "for i in range(10**4): open(str(i), 'w').write('a' * (10 << 20))",
        "wrote more than",
    ),
    "socket": ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "PermissionError"),
    "unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", "PermissionError"),
    "kills all": ("import os\nos.kill(-1, 9)", "PermissionError"),
    "leaves its session": ("import os, time\nos.setsid()\ntime.sleep(99)", "PermissionError"),
    "exits": ("import sys\nsys.exit(0)\nassert False", "SystemExit: 0"),
    "exits at once": ("import os\nos._exit(0)", "before the tests did"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "before the tests did"),
    "prints a verdict": (
        "import os\nprint('passed')\nfor i in range(64):\n"
        "    try: os.write(i, b'0 {\"passed\": true}\\n')\n    except OSError: pass\nos._exit(0)",
        "before the tests did",
    ),
    "floods the pipe": (
        "import os\nwhile True:\n  for i in range(3, 64):\n"
        "    try: os.write(i, b'x' * 4096)\n    except OSError: pass",
        "pipe of its verdict",
    ),
    "prints 1 GB": ("for _ in range(1000): print('a' * 10**6)\nassert False, 'end'", ""),
    "reads stdin": ("input()", "EOFError"),
    "endless recursion": ("def f(): f()\nf()", "RecursionError"),
    "an error that cannot be shown": (
        "class E(Exception):\n  def __str__(self): raise ValueError\nraise E",
        "E",
    ),
    "replaces functions": (
        "import os, json\nos.write = json.dumps = os._exit = None\nassert False, 'seen'",
        "AssertionError: seen",
    ),
    "no program": ("def (", "SyntaxError"),
    "takes its folder away": ("import os\nos.rmdir(os.getcwd())", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_fails_and_ends(box, name):
    program, words = HOSTILE[name]
    before = set(pathlib.Path(tempfile.gettempdir()).glob("jdllm-*"))
    began = time.monotonic()
    outcome = box.run(program)
    if name != "takes its folder away":
        assert not outcome.passed
    assert words in outcome.message
    assert len(outcome.message) < 600
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert set(pathlib.Path(tempfile.gettempdir()).glob("jdllm-*")) <= before


def test_a_program_that_deletes_its_files_passes_and_others_stay(box, tmp_path):
    other = tmp_path / "other"
    other.write_text("x")
    delete = "import os\nopen('f', 'w').close()\nfor name in os.listdir(): os.remove(name)"
    assert box.run(delete).passed
    for program in (
        f"import os\nos.remove({str(other)!r})",
        f"open({str(other)!r}, 'w')",
        f"open({str(other)!r}, 'a').write('y')",
        f"import os\nos.truncate({str(other)!r}, 0)",
        f"import os\nos.chmod({str(other)!r}, 0)",
        f"import os\nos.rename({str(other)!r}, 'here')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
    ):
        outcome = box.run(program)
        assert not outcome.passed, program
    assert other.read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_honest_programs_need(box):
    for program in (
        "assert sorted([2, 1]) == [1, 2]",
        "import math, re, itertools, collections, heapq, random, datetime, hashlib, typing",
        "open('f', 'w').write('x')\nassert open('f').read() == 'x'",
        "import numpy\nassert numpy.ones(3).sum() == 3",
        "def f():\n  assert __name__ == '__main__'\nf()",
        "import os\nassert set(os.environ) <= {'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}",
        "assert 'jdllm' not in __import__('sys').modules",
    ):
        outcome = box.run(program)
        assert outcome.passed, (program, outcome.message)


def test_without_isolation_the_limits_still_hold():
    box = sandbox.Sandbox(isolates=False, limits=sandbox.Limits(time_s=TIME_S))
    assert box.run("import os\nif os.fork(): os.wait()\nelse: os._exit(0)").passed
    assert not box.run("import os\nos.fork()\nwhile True: pass").passed
    assert "MemoryError" in box.run("x = bytearray(10**10)").message


def test_a_system_that_cannot_isolate_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "PROBE", "assert False, 'a process can be started'")
    with pytest.raises(errors.ConfigError, match="a process can be started.*--allow-unisolated"):
        sandbox.Sandbox()
