"""Ctrl-C and SIGTERM end a run at the end of a step, whose checkpoint is written."""

import concurrent.futures.process
import contextlib
import multiprocessing
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import tiny_scenes, tiny_text
from support.waiting import wait_until

from jdllm.train import __main__, checkpoints, stop_request, text
from jdllm.train.scenes import evaluate, programs

BOTH = pytest.mark.parametrize("number", stop_request.SIGNALS, ids=lambda number: number.name)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_text.write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def signalled(monkeypatch):
    """Returns a function: a step then takes signals, and returns as if nothing had been."""

    def at(step, *numbers):
        whole = text.TextRecipe.step

        def with_signals(self, state, batch):
            after, metrics = whole(self, state, batch)
            if int(after.step) == step:
                for number in numbers:
                    signal.raise_signal(number)
            return after, metrics

        monkeypatch.setattr(text.TextRecipe, "step", with_signals)

    return at


def steps_of(output_dir):
    return [path.name for path in (output_dir / "checkpoints").iterdir()]


@BOTH
def test_a_signal_saves_the_step_and_the_same_command_goes_on(
    model_path, tmp_path, signalled, capfd, number
):
    before = [signal.getsignal(one) for one in stop_request.SIGNALS]
    run = tmp_path / "run"
    argv = tiny_text.arguments(model_path, run, num_steps=5)
    signalled(3, number)
    assert __main__.main(argv) == 128 + number
    assert steps_of(run) == ["3"]
    out, err = capfd.readouterr()
    assert out == "" and "stopping after this step" in err
    last = err.splitlines()[-1]
    assert last.startswith(f"jdllm train: error: stopped by {number.name}; the same command")
    assert f"resumes from step 3, the newest checkpoint in {run / 'checkpoints'}" in last
    assert [signal.getsignal(one) for one in stop_request.SIGNALS] == before
    assert __main__.main(argv) == 0
    assert "training from step 3 to 5" in capfd.readouterr().err


def test_the_signal_of_a_group_ends_processes_that_make_batches_and_no_step_is_lost(
    model_path, tmp_path, monkeypatch, capfd
):
    whole, taken = text.TextBatches.__next__, []
    late = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))

    def gone(self):
        if len(taken) < 3:
            taken.append(whole(self))
            return taken[-1]
        # This process gets the signal a moment later, and sees only then why they are gone.
        late.start()
        raise RuntimeError("Worker process was terminated unexpectedly")

    monkeypatch.setattr(text.TextBatches, "__next__", gone)
    run = tmp_path / "run"
    argv = tiny_text.arguments(model_path, run, checkpoint_every=1000)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # of the tests: they go on
    try:
        assert __main__.main(argv) == 128 + signal.SIGTERM
    finally:
        late.join()
        signal.signal(signal.SIGTERM, before)
    assert steps_of(run) == ["3"]
    assert "resumes from step 3" in capfd.readouterr().err.splitlines()[-1]


def test_a_signal_before_the_first_step_leaves_the_run_before(model_path, tmp_path, monkeypatch):
    run = tmp_path / "run"
    argv = tiny_text.arguments(model_path, run, num_steps=2)
    assert __main__.main(argv) == 0

    def gone(self):
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("Worker process was terminated unexpectedly")

    monkeypatch.setattr(text.TextBatches, "__next__", gone)
    assert __main__.main([*argv, "--resume", "never"]) == 128 + signal.SIGTERM
    assert steps_of(run) == []
    assert [path.name for path in (run / "checkpoints.old").iterdir()] == ["2"]


def test_processes_that_are_gone_without_a_signal_are_an_error(model_path, tmp_path, monkeypatch):
    def gone(self):
        raise RuntimeError("Worker process was terminated unexpectedly")

    monkeypatch.setattr(text.TextBatches, "__next__", gone)
    with pytest.raises(RuntimeError, match="terminated unexpectedly"):
        __main__.main(tiny_text.arguments(model_path, tmp_path / "run"))


@pytest.mark.parametrize("ends", ["the signal", "its processes"])
def test_a_signal_while_a_run_is_built_leaves_no_process(tmp_path, monkeypatch, ends, capfd):
    """A pool that is open when the interpreter exits may show an error of its own."""

    def signalled_with_processes(*_, **__):
        assert multiprocessing.active_children()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise {
            "the signal": KeyboardInterrupt,
            "its processes": concurrent.futures.process.BrokenProcessPool,
        }[ends]

    monkeypatch.setattr(programs, "Programs", lambda *_: None)  # real ones compile for a minute
    monkeypatch.setattr(evaluate, "Evaluator", signalled_with_processes)
    words, _ = endless("scenes", tmp_path)
    assert __main__.main(words) == 128 + signal.SIGTERM
    assert multiprocessing.active_children() == []
    assert "error: stopped by SIGTERM; there is no checkpoint" in capfd.readouterr().err


def test_a_checkpoint_that_a_signal_cannot_write_is_the_error(
    model_path, tmp_path, signalled, monkeypatch, capfd
):
    """Not a stop that one resumes from."""

    def full(*_):
        raise checkpoints.WriteError("no space left")

    signalled(3, signal.SIGTERM)
    monkeypatch.setattr(checkpoints, "save_now", full)
    assert __main__.main(tiny_text.arguments(model_path, tmp_path / "run")) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "jdllm train: error: no space left"


def test_a_signal_that_is_sent_twice_is_asked_once(model_path, tmp_path, signalled):
    """As `timeout` of coreutils does: to the command, and then to the command's group."""
    run = tmp_path / "run"
    signalled(3, signal.SIGTERM, signal.SIGTERM)
    argv = tiny_text.arguments(model_path, run)
    assert __main__.main(argv) == 128 + signal.SIGTERM
    assert steps_of(run) == ["3"]

    # Later it is asked again, and ends the block at once.
    stop, passed = stop_request.StopRequest(), []
    with stop.listening(), pytest.raises(KeyboardInterrupt), stop.deferred():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(stop_request.SENDING_S)
        signal.raise_signal(signal.SIGTERM)
        passed.append("the rest of the step")
    assert passed == []


def test_a_second_signal_ends_the_run_at_once(model_path, tmp_path, signalled, capfd):
    run = tmp_path / "run"
    signalled(3, signal.SIGTERM, signal.SIGINT)
    argv = tiny_text.arguments(model_path, run)
    assert __main__.main(argv) == 128 + signal.SIGTERM
    assert steps_of(run) == []
    assert "error: stopped by SIGTERM; there is no checkpoint" in capfd.readouterr().err


def test_a_signal_ends_what_loses_no_step_at_once():
    stop = stop_request.StopRequest()
    with stop.listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM

    stop, passed = stop_request.StopRequest(), []
    with stop.listening(), pytest.raises(KeyboardInterrupt), stop.deferred():
        with stop.at_once():
            passed.append("an evaluation")
        signal.raise_signal(signal.SIGINT)
        passed.append("the rest of the step")
        with stop.at_once():
            passed.append("an evaluation after the signal")
    assert passed == ["an evaluation", "the rest of the step"]

    stop = stop_request.StopRequest()
    with stop.listening(), pytest.raises(KeyboardInterrupt), stop.deferred(), stop.at_once():
        signal.raise_signal(signal.SIGINT)
        passed.append("the rest of an evaluation")
    assert len(passed) == 2


TINY = {"text": tiny_text, "scenes": tiny_scenes}
RECIPES = ["text", pytest.param("scenes", marks=pytest.mark.campaign)]
ENDLESS = {"num_steps": 10**6, "log_every": 1, "checkpoint_every": 10**6, "data_workers": 1}


def started(words):
    """Returns a run that leads a group of processes."""
    command = shlex.join([sys.executable, "-m", "jdllm.train", *words])
    # A shell's job in the background ignores SIGINT from its beginning.
    return subprocess.Popen(
        ["sh", "-c", f"trap '' INT; exec {command}"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def endless(recipe, folder):
    """Returns the command line of a run with a process that makes batches, and its folder."""
    run, model, tiny = folder / "run", folder / "model", TINY[recipe]
    model.mkdir()
    return tiny.arguments(tiny.write_model(model), run, **ENDLESS), run


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("recipe", RECIPES)
@BOTH
def test_a_signal_while_processes_that_make_batches_start_is_one_line(tmp_path, recipe, number):
    """They import for seconds, and the run waits for their first batch."""
    words, _ = endless(recipe, tmp_path)
    child = started(words)
    try:
        wait_until(lambda: is_making_batches(child.pid), 300)
        time.sleep(0.5)  # it has been told what to do, and imports
        os.killpg(child.pid, number)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 128 + number, err
    assert "Traceback" not in err
    assert f"error: stopped by {number.name}; " in err.splitlines()[-1]
    wait_until(lambda: not is_alive(child.pid))


def is_making_batches(group):
    """Returns whether the group has a process that makes batches, or will."""
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, in brackets: the state, the parent, the group.
            is_of_group = int(status.read_text().rpartition(")")[2].split()[2]) == group
            words = (status.parent / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if is_of_group and b"spawn_main" in words:
            return True
    return False


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.campaign)],
    ids=lambda number: number.name,
)
def test_a_signal_reaches_every_process_of_a_run_and_its_step_is_saved(tmp_path, recipe, number):
    """As a terminal or `timeout` sends it: to the whole group."""
    words, run = endless(recipe, tmp_path)
    child = started(words)
    try:
        wait_until((run / "curve.jsonl").exists, 300)
        os.killpg(child.pid, number)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 128 + number, err
    (step,) = steps_of(run)
    assert f"error: stopped by {number.name}; the same command resumes from step {step}, " in err
    assert "Traceback" not in err
    assert int(step) >= 1 and (run / "run.json").is_file()
    # Nothing of the group is left.
    wait_until(lambda: not is_alive(child.pid))


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
