"""The command line of training: its mistakes are one line on stderr and exit code 2."""

import pytest

from jdllm import errors
from jdllm.train import __main__, config


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the folder of a run is made
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model_path: {tmp_path / 'nowhere'}\n")
    return file


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "eval_every=0"], "eval_every=0"),
        (["--set", "num_steps=20", "decay_share=30"], "error: decay_share=30.0 must be above 0"),
        (["--set", "num_steps=20", "--set", "optimizer=sgd"], "error: optimizer='sgd' must"),
        (["--set", "attention=flash"], "error: attention='flash' must be 'auto', "),
        (["--set", "compute_dtype=int8"], "error: compute_dtype='int8' must be 'bfloat16' or "),
        (["--set", "learning_rat=1"], "learning_rate"),
        (["--set", "recipe=txt"], "recipe='txt'"),
        (["--set", "learning_rate=fast"], "learning_rate='fast'"),
        (["--set", "eval_thresholds=[a]"], "eval_thresholds=['a']"),
        (["--set", "seed=[1"], "--set seed is not valid YAML"),
        (["--set", "seed"], "key=value"),
        ([], "nowhere"),  # the model folder
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(recipe, arguments, named, capfd):
    assert __main__.main(["--config", str(recipe), *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("jdllm train: error: ") and err.count("\n") == 1
    assert named in err


def test_exported_weights_must_have_a_place_before_the_run(recipe, tmp_path, capfd):
    (tmp_path / "file").touch()
    stem = tmp_path / "file" / "state"
    assert __main__.main(["--config", str(recipe), "--export-state", str(stem)]) == 2
    assert f"--export-state {stem} cannot be written" in capfd.readouterr().err
    # Its folder is made, and then the model is looked for.
    stem = tmp_path / "new" / "state"
    assert __main__.main(["--config", str(recipe), "--export-state", str(stem)]) == 2
    assert "nowhere" in capfd.readouterr().err
    assert list(stem.parent.iterdir()) == []


def test_a_missing_or_malformed_config_file_is_named(tmp_path, capfd):
    assert __main__.main(["--config", str(tmp_path / "absent.yaml")]) == 2
    for text in ("- a list\n", "{"):
        (tmp_path / "bad.yaml").write_text(text)
        assert __main__.main(["--config", str(tmp_path / "bad.yaml")]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("jdllm train: error: ") for line in lines)
    assert "absent.yaml" in lines[0] and "bad.yaml" in lines[1] and "bad.yaml" in lines[2]


@pytest.mark.parametrize(
    "name",
    [
        "num_steps",
        "batch_size",
        "noise_copies",
        "warmup_steps",
        "log_every",
        "checkpoint_every",
        "eval_every",
        "eval_problems",
        "data_threads",
        "prefetch_batches",
    ],
)
def test_counts_are_at_least_one(name):
    with pytest.raises(errors.ConfigError, match=f"{name}=0 must be at least 1"):
        config.from_mapping({"model_path": "x", name: 0})
