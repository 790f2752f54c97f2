"""Ctrl-C and SIGTERM end a run at the end of a step, whose checkpoint is written."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
from support import tiny_scenes, tiny_text
from support.waiting import wait_until

from jdllm.train import __main__ as train_main
from jdllm.train import stop_request, text

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
    assert train_main.main(argv) == 128 + number
    assert steps_of(run) == ["3"]
    out, err = capfd.readouterr()
    assert out == "" and "stopping after this step" in err
    last = err.splitlines()[-1]
    assert last.startswith(f"jdllm train: error: stopped by {number.name}; the same command")
    assert f"resumes from step 3, the newest checkpoint in {run / 'checkpoints'}" in last
    assert [signal.getsignal(one) for one in stop_request.SIGNALS] == before
    assert train_main.main(argv) == 0
    assert "training from step 3 to 5" in capfd.readouterr().err


def test_a_second_signal_ends_the_run_at_once(model_path, tmp_path, signalled, capfd):
    run = tmp_path / "run"
    signalled(3, signal.SIGTERM, signal.SIGINT)
    argv = tiny_text.arguments(model_path, run)
    assert train_main.main(argv) == 128 + signal.SIGTERM
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


@pytest.mark.parametrize("recipe", ["text", pytest.param("scenes", marks=pytest.mark.campaign)])
def test_ctrl_c_reaches_every_process_of_a_run_and_its_step_is_saved(tmp_path, recipe):
    """As a terminal sends it: to the whole group, with the processes that make batches."""
    run, model, tiny = (
        tmp_path / "run",
        tmp_path / "model",
        {"text": tiny_text, "scenes": tiny_scenes},
    )
    model.mkdir()
    endless = {"num_steps": 10**6, "log_every": 1, "checkpoint_every": 10**6, "data_workers": 1}
    words = tiny[recipe].arguments(tiny[recipe].write_model(model), run, **endless)
    command = shlex.join([sys.executable, "-m", "jdllm.train", *words])
    # A shell's job in the background ignores SIGINT from its beginning.
    child = subprocess.Popen(
        ["sh", "-c", f"trap '' INT; exec {command}"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until((run / "curve.jsonl").exists, 300)
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 128 + signal.SIGINT, err
    (step,) = steps_of(run)
    assert f"error: stopped by SIGINT; the same command resumes from step {step}, " in err
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
