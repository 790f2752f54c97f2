"""Servers and benchmarks that a script starts end with it, whatever ends it."""

import importlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jdllm.client import failures

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
LIMIT_S = 60  # beside another test run on two cores

READY, HEARD = "ready\n", f"heard {int(signal.SIGTERM)}\n"
CHILD = """
import signal, sys, time
def heard(number, _):
    print("heard", number, flush=True)
    {then}
signal.signal(signal.SIGTERM, heard)
print("ready", flush=True)
while True:
    time.sleep(60)
"""
OBEDIENT, STUBBORN = CHILD.format(then="sys.exit()"), CHILD.format(then="pass")
PARENT_OF_STUBBORN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}])"
SCRIPT = """
import signal, sys
import child_process
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
with child_process.started([sys.executable, "-c", {child!r}], stop_s={stop_s}) as process:
    process.wait()
"""
SERVER = """
import http.server, sys
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "a-model"}]}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Models).serve_forever()
"""


def ended_by(number, child, *, stop_s):
    """Returns the exit code of a script that gets a signal, and what its child wrote from then on.

    The child and its children write to the script's pipe: it has an end once all of them have.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(child=child, stop_s=stop_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
    ) as process:
        try:
            assert process.stdout.readline() == READY
            process.send_signal(number)
            out, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_signal_to_the_script_ends_the_child_in_order(number, code):
    assert ended_by(number, OBEDIENT, stop_s=LIMIT_S) == (code, HEARD)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel can be asked")
def test_a_script_that_is_killed_takes_the_child_along():
    assert ended_by(signal.SIGKILL, STUBBORN, stop_s=LIMIT_S) == (-signal.SIGKILL, "")


@pytest.mark.parametrize(
    ("child", "out"), [(STUBBORN, HEARD), (PARENT_OF_STUBBORN, "")], ids=["child", "grandchild"]
)
def test_what_does_not_end_is_killed(child, out):
    found = ended_by(signal.SIGTERM, child, stop_s=0.5)
    assert found == (128 + signal.SIGTERM, out)


@pytest.fixture
def imported(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def test_an_error_ends_the_child_and_leaves_no_handler(imported):
    before = signal.getsignal(signal.SIGTERM)
    command = [sys.executable, "-c", OBEDIENT]
    with (
        pytest.raises(ValueError, match="a fault"),
        imported("child_process").started(command, output=subprocess.DEVNULL) as process,
    ):
        assert process.poll() is None
        raise ValueError("a fault")
    assert process.returncode is not None
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_looks_whether_a_process_has_ended_leaves_its_pid(imported):
    child_process = imported("child_process")
    for code, command in ((3, "sys.exit(3)"), (-9, "import os; os.kill(os.getpid(), 9)")):
        with child_process.started([sys.executable, "-c", f"import sys; {command}"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert child_process.exit_code(process) == child_process.exit_code(process) == code
            assert process.returncode is None
        assert process.returncode == code


def test_a_started_server_is_ready_and_ends_with_the_block(imported, monkeypatch, tmp_path):
    started_server = imported("started_server")
    monkeypatch.setattr(started_server, "COMMAND", (sys.executable, "-c", SERVER))
    log = str(tmp_path / "log")
    with started_server.started([], log_file=log, limit_s=LIMIT_S) as server:
        assert server.model == "a-model" and server.start_s > 0
        assert server.client.json("GET", "/v1/models")["data"]
    with pytest.raises(failures.NoConnection):
        server.client.json("GET", "/v1/models")


def test_a_server_that_does_not_start_says_how_it_ended(imported, monkeypatch, tmp_path):
    started_server = imported("started_server")
    command = (sys.executable, "-c", "import sys; print('no such model'); sys.exit(2)")
    monkeypatch.setattr(started_server, "COMMAND", command)
    with (
        pytest.raises(SystemExit, match="(?s)but ended with 2; .*no such model"),
        started_server.started([], log_file=str(tmp_path / "log"), limit_s=LIMIT_S),
    ):
        raise AssertionError("there is no server")


def test_a_part_of_bench_models_says_how_it_ended(imported, tmp_path):
    bench_models, log = imported("bench_models"), tmp_path / "log"

    def run(program, limit_s=LIMIT_S):
        return bench_models.run([sys.executable, "-c", program], log, limit_s)

    assert run("print('a figure')") == "done"
    assert run("raise SystemExit(3)") == "FAILED with 3"
    assert run(OBEDIENT, limit_s=1) == "stopped after 1 s"
    assert "a figure" in log.read_text()
