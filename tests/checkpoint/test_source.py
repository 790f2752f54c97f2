"""What a person types as a model."""

import pytest

from jdllm import errors
from jdllm.checkpoint import source


def test_bundled_models_are_found_by_name_and_one_without():
    assert source.resolve(None) == source.resolve("jdllm-nano") == source.bundled_model()
    for name in source.BUNDLED_MODELS:
        assert source.resolve(name).name == name
        assert (source.resolve(name) / "model.safetensors").is_file()


def test_a_directory_comes_before_the_bundled_model_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jdllm-nano").mkdir()
    with pytest.raises(errors.ConfigError, match=r"holds no config\.json"):
        source.resolve("jdllm-nano")
    (tmp_path / "jdllm-nano" / "config.json").write_text("{}")
    assert source.resolve("jdllm-nano").resolve() == tmp_path / "jdllm-nano"


def test_a_pipeline_has_an_index_in_place_of_a_config(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"no config\.json and no model_index\.json"):
        source.resolve(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    assert source.resolve(tmp_path) == tmp_path
    assert source.is_pipeline(tmp_path)
    assert not source.is_pipeline(source.bundled_model())
