"""A tiny run on CPU: its loss falls, it resumes bit for bit, its export loads."""

import dataclasses
import errno
import fcntl
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_text

from jdllm import errors
from jdllm.models import loading
from jdllm.train import (
    __main__,
    checkpoints,
    config,
    denoise,
    evaluate,
    examples,
    loop,
    recipes,
    run_lock,
    step,
    text,
)

NANO = pathlib.Path(examples.__file__).parents[1] / "assets" / "jdllm-nano"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_text.write_model(tmp_path_factory.mktemp("tiny"))


def run_config(model_path, **changes):
    return config.from_mapping({**tiny_text.SETTINGS, "model_path": str(model_path), **changes})


def curve(folder):
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


@pytest.mark.campaign
def test_a_run_learns_resumes_bit_for_bit_and_exports(model_path, tmp_path, caplog):
    caplog.set_level("INFO", logger="jdllm.train.evaluate")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    settings = run_config(model_path)
    loop.train(settings, loop.RunPaths(output_dir=whole))
    losses = [line["loss"] for line in curve(whole) if "loss" in line]
    assert losses[-1] < losses[0] - 1.0
    assert "evaluation 1 of 2: 2 problems @one_token" in caplog.text
    assert "evaluation 2 of 2: 2 problems @0.9" in caplog.text

    # The second run is the first one, killed after its checkpoint of step 20.
    halves.mkdir()
    shutil.copytree(whole / "checkpoints" / "20", halves / "checkpoints" / "20")
    loop.train(settings, loop.RunPaths(output_dir=halves, export_state=halves / "state"))
    assert [line["loss"] for line in curve(halves) if "loss" in line] == losses[4:]
    one, two = (f / "hf" / "model.safetensors" for f in (whole, halves))
    assert one.read_bytes() == two.read_bytes()

    with pytest.raises(errors.ConfigError, match=r"learning_rate: 0\.003 -> 0\.001"):
        loop.train(run_config(model_path, learning_rate=1e-3), loop.RunPaths(output_dir=halves))

    loaded = loading.load(whole / "hf", show_progress=False)
    imported = checkpoints.import_parts(halves / "state")
    assert int(imported.step) == 30
    for path, array in loaded.params.items():
        want = imported.average[path].astype(array.dtype)
        assert np.array_equal(np.asarray(array), np.asarray(want)), path
    folder = recipes.build(settings, tmp_path).weights_of(whole / "hf")
    assert folder.step == 0
    assert folder.params.keys() == imported.average.keys()
    for path, array in folder.params.items():
        want = imported.average[path].astype(loaded.params[path].dtype).astype(np.float32)
        assert array.dtype == np.float32 and np.array_equal(array, want), path
        assert np.array_equal(array, folder.average[path]), path

    # As runs were exported before linear weights lay [out, in].
    turned = {
        path: array.T if path.endswith((".w_qkv", ".w_out")) else array
        for path, array in imported.params.items()
    }
    checkpoints.export_parts(dataclasses.replace(imported, params=turned), tmp_path / "old")
    paths = loop.RunPaths(output_dir=tmp_path / "again", import_state=tmp_path / "old")
    with pytest.raises(errors.ConfigError, match=r"w_qkv is \(\d+, \d+\), not"):
        loop.train(settings, paths)


def test_a_run_begins_with_a_bundled_model_by_its_name(model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = loop.RunPaths(output_dir=tmp_path / "run", import_state=pathlib.Path("jdllm-nano"))
    # Its weights are found: they do not fit the smaller model of this test.
    with pytest.raises(errors.ConfigError, match=r"jdllm-nano: \d+ arrays do not fit") as bundled:
        loop.train(run_config(model_path), paths)
    assert "missing" not in str(bundled.value)
    np.savez(tmp_path / "jdllm-nano.0.npz", step=1)  # exported files of the same name come first
    with pytest.raises(errors.ConfigError, match="missing"):
        loop.train(run_config(model_path), paths)


def test_a_run_that_is_not_resumed_leaves_nothing_of_the_one_before(model_path, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "7").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "curve.jsonl").write_text('{"step": 7}\n')
    argv = [*tiny_text.arguments(model_path, run, num_steps=2), "--resume", "never"]
    # Nothing is deleted for a run that does not begin.
    assert __main__.main([*argv, "--import-state", str(tmp_path / "nowhere")]) == 2
    assert (run / "checkpoints" / "7").is_dir() and "7" in (run / "curve.jsonl").read_text()
    assert __main__.main(argv) == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
    assert not (run / "checkpoints.old").exists()
    assert [line["step"] for line in curve(run)] == [2]
    assert json.loads((run / "run.json").read_text())["num_steps"] == 2


def test_the_checkpoints_before_are_kept_until_the_new_run_has_one(
    model_path, tmp_path, monkeypatch, capfd
):
    run = tmp_path / "run"
    argv = tiny_text.arguments(model_path, run, num_steps=2, checkpoint_every=1)
    assert __main__.main(argv) == 0
    anew, whole, stops = [*argv, "--resume", "never"], text.TextRecipe.step, [0]

    def stopped(self, state, batch):
        after = whole(self, state, batch)
        if int(after[0].step) - 1 in stops:  # in the middle of a step
            raise KeyboardInterrupt
        return after

    monkeypatch.setattr(text.TextRecipe, "step", stopped)
    # The second one finds nothing that is newer than what the first has moved.
    for _ in range(2):
        assert __main__.main(anew) == 130
        assert f"the run before are in {run / 'checkpoints.old'}" in capfd.readouterr().err
        steps = sorted(path.name for path in (run / "checkpoints.old").iterdir())
        assert steps == ["1", "2"]
        assert checkpoints.newest(run / "checkpoints") is None
    # With a checkpoint, the new run is the one of the folder.
    stops[:] = [1]
    assert __main__.main(anew) == 130
    assert f"deleting {run / 'checkpoints.old'}: " in capfd.readouterr().err
    assert checkpoints.newest(run / "checkpoints") == 1
    assert not (run / "checkpoints.old").exists()
    # Older ones make room for those of the run that is set aside now.
    (run / "checkpoints.old" / "9").mkdir(parents=True)
    stops[:] = [0]
    assert __main__.main(anew) == 130
    assert [path.name for path in (run / "checkpoints.old").iterdir()] == ["1"]
    # In their place, they are those of the run before, with its settings.
    (run / "checkpoints").rmdir()
    (run / "checkpoints.old").rename(run / "checkpoints")
    stops.clear()
    assert __main__.main(argv) == 0
    assert "training from step 1 to 2" in capfd.readouterr().err


def test_settings_are_those_of_the_checkpoints(model_path, tmp_path, monkeypatch, capfd):
    def argv(num_steps):
        return tiny_text.arguments(model_path, run, num_steps=num_steps)

    def kept():
        return json.loads((run / "run.json").read_text())["num_steps"]

    run = tmp_path / "run"
    assert __main__.main(argv(2)) == 0
    assert kept() == 2
    whole = text.TextRecipe.step

    def stopped(self, state, batch):
        raise KeyboardInterrupt

    # A slip, and Ctrl-C before there is a checkpoint of so many steps: it is undone.
    monkeypatch.setattr(text.TextRecipe, "step", stopped)
    assert __main__.main(argv(300)) == 130
    assert kept() == 2
    monkeypatch.setattr(text.TextRecipe, "step", whole)
    assert __main__.main(argv(3)) == 0
    assert kept() == 3
    assert __main__.main(argv(2)) == 2
    assert "num_steps: 3 -> 2" in capfd.readouterr().err


def test_a_run_whose_minutes_are_over_takes_no_step_more(model_path, tmp_path, capfd):
    run = tmp_path / "run"
    argv = tiny_text.arguments(model_path, run, num_steps=10**6, max_minutes=0.1)
    assert __main__.main(argv) == 0
    last = checkpoints.newest(run / "checkpoints")
    before = curve(run)[-1]
    assert before["step"] == last and before["seconds"] >= 6
    capfd.readouterr()
    assert __main__.main(argv) == 0
    assert f"training from step {last} to " in capfd.readouterr().err
    assert checkpoints.newest(run / "checkpoints") == last
    # It is evaluated, and the seconds of the curve are the run's.
    after = curve(run)[-1]
    assert after["step"] == last and after["seconds"] >= 6
    assert after.keys() == before.keys()


def test_a_run_does_not_go_on_with_the_curve_of_one_that_left_no_checkpoint(model_path, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "curve.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    assert __main__.main(tiny_text.arguments(model_path, run, num_steps=2)) == 0
    assert [line["step"] for line in curve(run)] == [2]
    # That of a run with a checkpoint goes on.
    assert __main__.main(tiny_text.arguments(model_path, run, num_steps=3)) == 0
    assert [line["step"] for line in curve(run)] == [2, 3]


def test_a_second_run_in_the_folder_is_refused_before_it_changes_anything(
    model_path, tmp_path, capfd
):
    run = tmp_path / "run"
    argv = [*tiny_text.arguments(model_path, run, num_steps=2), "--resume", "never"]
    # Another process holds the folder, as a run does, until its input ends.
    program = "import pathlib, sys; from jdllm.train import run_lock\n"
    program += "with run_lock.held(pathlib.Path(sys.argv[1])): print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == "\n"
        (run / "curve.jsonl").write_text('{"step": 7}\n')
        assert __main__.main(argv) == 2
        err = capfd.readouterr().err
        assert err.startswith(f"jdllm train: error: another process trains in {run}; ")
        assert err.count("\n") == 1 and "7" in (run / "curve.jsonl").read_text()
    finally:
        holder.kill()  # which leaves the file, and holds nothing
        holder.communicate()
    assert __main__.main(argv) == 0


def test_a_folder_that_cannot_be_locked_is_said(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    caplog.set_level("INFO", logger="jdllm.train.run_lock")
    with run_lock.held(tmp_path):
        assert f"{tmp_path} cannot be locked" in caplog.text


def test_a_stop_during_evaluation_loses_no_step(model_path, tmp_path, monkeypatch):
    def stop(_params):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluator", lambda *_: stop)
    monkeypatch.chdir(tmp_path)
    values = dataclasses.asdict(run_config(model_path, eval_every=3, eval_thresholds=[]))
    (tmp_path / "tiny.json").write_text(json.dumps(values))  # JSON is YAML
    assert __main__.main(["--config", "tiny.json"]) == 130
    folder = tmp_path / "runs" / "tiny" / "checkpoints"  # where a run without --output-dir writes
    assert [path.name for path in folder.iterdir()] == ["3"]


def test_batches_are_a_function_of_the_step(model_path):
    chat = examples.ChatFormat(model_path)
    layout = examples.Layout(sequence_length=192, block_size=32, answer_blocks=4)
    source = examples.ProblemBatches(chat, layout, batch_size=4, seed=0, length=10)
    ahead = examples.batches(source, start_step=3, num_threads=2, num_workers=0, prefetch=4)
    for number in range(3, 6):
        batch = next(ahead)
        assert all(np.array_equal(batch[key], source[number][key]) for key in batch)
    ahead.close()
    row, prompt = batch["tokens"][0], batch["prompt_lens"][0]
    total = batch["total_lens"][0]
    end = list(row).index(chat.turn_end_id, prompt)
    assert total % 32 == 0 and end < total and (row[end + 1 :] == chat.pad_id).all()
    assert "####" in chat.decode(row[prompt:end].tolist())


def test_one_token_per_step_writes_every_position_once(model_path):
    hf = json.loads((model_path / "config.json").read_text())
    network = step.build_network(hf, "float32")
    params = step.init_params(network, 0)
    chat = examples.ChatFormat(model_path)
    layout = examples.Layout(sequence_length=96, block_size=32, answer_blocks=2)
    _, batch = examples.heldout(chat, layout, 2)
    run = denoise.denoiser(network, length=96, stop_ids=())
    rows = run(params, batch["tokens"], batch["prompt_lens"], jnp.float32(2.0))
    blocks = 3 - batch["prompt_lens"] // 32
    # A forward per masked position, and a persist forward per block but the last.
    assert np.array_equal(rows.forwards, 96 - batch["prompt_lens"] + blocks - 1)
    assert not np.any(rows.masked)
    assert not np.any(rows.tokens == 2)
    for row, prompt in enumerate(batch["prompt_lens"]):
        assert np.array_equal(rows.tokens[row, :prompt], batch["tokens"][row, :prompt])
    every = run(params, batch["tokens"], batch["prompt_lens"], jnp.float32(0.0))
    assert np.array_equal(every.forwards, 2 * blocks - 1)


def test_balance_moves_biases_toward_equal_load(model_path):
    settings = run_config(model_path, balance_rate=0.01, answer_blocks=2)
    hf = json.loads((model_path / "config.json").read_text())
    network = step.build_network(hf, "float32")
    params = step.init_params(network, 0)
    path = "layers.1.mlp.router.expert_bias"
    params[path] = jnp.array([1.0, 0.0, 0.0, -1.0])  # expert 0 always chosen, 3 never
    state = step.init_state(settings, params, average=params, step=0)
    chat = examples.ChatFormat(model_path)
    layout = examples.Layout(sequence_length=96, block_size=32, answer_blocks=2)
    _, batch = examples.heldout(chat, layout, 2)
    noise = step.noise_config(network, settings)
    moved, _ = step.train_step(network, settings, noise)(state, batch, np.float32(3e-3))
    assert float(moved.params[path][0]) == pytest.approx(0.99)
    assert float(moved.params[path][3]) == pytest.approx(-0.99)


def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model_path: x\nlearning_rat: 1e-3\n")
    with pytest.raises(errors.ConfigError, match="learning_rate"):
        recipes.load(file)
    file.write_text("model_path: x\nlearning_rate: 1e-3\n")
    assert recipes.load(file, ["num_steps=20", "decay_share=0.3"]).num_steps == 20
    assert recipes.load(file).learning_rate == 1e-3
    with pytest.raises(errors.ConfigError, match="batch_size"):
        recipes.load(file, ["batch_size=many"])


def test_the_shipped_config_is_valid():
    shipped = recipes.load(NANO.parents[2] / "configs" / "train" / "nano.yaml")
    assert shipped.model_path == "jdllm-nano"
    hf = json.loads((NANO / "config.json").read_text())
    network = step.build_network(hf, shipped.compute_dtype)
    size = sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in network.shapes.values())
    assert size < 16 * 2**20
    assert jax.tree.leaves(dict(network.shapes))
