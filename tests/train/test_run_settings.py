"""A run is resumed with its own settings, or refused with the names of those that differ."""

import json
import pathlib

import pytest

from jdllm import errors
from jdllm.train import __main__, config, recipes, run_settings


def of(**values):
    return config.from_mapping({"model_path": "m", "num_steps": 100, **values})


def resumed(folder, settings, import_state):
    new = run_settings.of(settings, import_state)
    return run_settings.resumed(folder, settings, new)


@pytest.fixture
def run(tmp_path):
    """Returns the folder of a run that began with the weights `w`."""
    run_settings.write(tmp_path, run_settings.of(of(seed=1), pathlib.Path("w")))
    return tmp_path


def test_the_file_names_every_option_and_the_first_weights(run):
    kept = json.loads((run / "run.json").read_text())
    assert kept["seed"] == 1 and kept["model_path"] == "m" and kept["eval_thresholds"] == [0.9]
    assert kept["import_state"] == "w"
    assert [path.name for path in run.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": 2e-3}, "learning_rate: 0.0015 -> 0.002"),
        ({"model_path": "other"}, "model_path: 'm' -> 'other'"),
        ({"seed": 2, "batch_size": 4}, "batch_size: 512 -> 4; seed: 1 -> 2"),
        ({"num_steps": 99}, "num_steps: 100 -> 99"),
        ({"attention": "xla"}, "attention: 'auto' -> 'xla'"),  # it rounds differently
        ({"log_every": 7, "dropout": 0.5}, "settings: dropout: 0.0 -> 0.5;"),
    ],
)
def test_settings_of_another_run_are_refused_by_name_with_both_values(run, changes, said):
    with pytest.raises(errors.ConfigError) as refused:
        resumed(run, of(**{"seed": 1, **changes}), None)
    assert said in str(refused.value) and str(run) in str(refused.value)
    assert "another --output-dir" in str(refused.value)


def test_weights_that_a_resumed_run_would_ignore_are_refused(run):
    with pytest.raises(errors.ConfigError, match="import_state: 'w' -> 'v'"):
        resumed(run, of(seed=1), pathlib.Path("v"))
    # Without the option, the run still is the one that began with them.
    for given in (None, pathlib.Path("w")):
        assert resumed(run, of(seed=1), given)["import_state"] == "w"


def test_another_recipe_is_one_difference(run):
    other = recipes.RECIPES["scenes"].config(model_path="m")
    with pytest.raises(errors.ConfigError, match="settings: recipe: 'text' -> 'scenes'; resume"):
        resumed(run, other, None)


def test_what_changes_no_step_and_how_long_it_goes_on_may_change_and_is_logged(run, caplog):
    caplog.set_level("INFO", logger="jdllm.train.run_settings")
    longer = of(seed=1, num_steps=101, log_every=7, data_workers=2, max_minutes=3.0)
    assert resumed(run, longer, None)["num_steps"] == 101
    for said in ("num_steps: 100 -> 101", "log_every: 50 -> 7", "max_minutes: None -> 3.0"):
        assert said in caplog.text


def test_every_setting_that_may_change_is_one_of_a_recipe():
    names = {name for kind in recipes.RECIPES.values() for name in kind.config.__slots__}
    names |= set(config.RunConfig.__slots__)
    assert names >= run_settings.MAY_CHANGE | run_settings.MINUTES


def test_an_option_newer_than_the_run_had_its_default(run):
    kept = json.loads((run / "run.json").read_text())
    del kept["dropout"]
    (run / "run.json").write_text(json.dumps(kept))
    resumed(run, of(seed=1), None)
    with pytest.raises(errors.ConfigError, match=r"dropout: 0\.0 -> 0\.1"):
        resumed(run, of(seed=1, dropout=0.1), None)


def test_a_run_older_than_the_file_goes_on_with_a_line_of_the_log(tmp_path, caplog):
    caplog.set_level("INFO", logger="jdllm.train.run_settings")
    assert resumed(tmp_path, of(), None) == run_settings.of(of(), None)
    assert f"{tmp_path / 'run.json'} does not exist: settings are not compared" in caplog.text


@pytest.mark.parametrize("text", ['{"seed": 1, "mod', "", "[1]", "\x80"])
def test_a_damaged_file_is_named_with_what_to_do(run, text):
    (run / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(errors.ConfigError, match=r"run\.json is damaged: .*delete it to resume"):
        resumed(run, of(seed=1), None)


def test_the_command_refuses_before_it_reads_the_model(run, tmp_path, capfd):
    (run / "checkpoints" / "7").mkdir(parents=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_path: nowhere\nnum_steps: 100\nseed: 1\n")
    words = ["--config", str(recipe), "--output-dir", str(run)]
    assert __main__.main(words) == 2
    assert "model_path: 'm' -> 'nowhere'" in capfd.readouterr().err
    # One that was never complete is none: the run begins, with these settings.
    (run / "checkpoints" / "7").rename(run / "checkpoints" / "7.orbax-checkpoint-tmp")
    assert __main__.main(words) == 2
    assert "settings" not in capfd.readouterr().err
