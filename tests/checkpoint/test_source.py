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
