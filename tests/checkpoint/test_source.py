"""What a person types as a model."""

import json

import huggingface_hub
import pytest

from jdllm import errors, serve
from jdllm.checkpoint import source
from jdllm.engine import engine
from jdllm.engine.start import startup
from jdllm.server import cli


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


FILES = (
    "model_index.json", "config.json", "README.md", "whole.safetensors",
    "scheduler/scheduler_config.json", "tokenizer/tokenizer.json", "tokenizer/merges.txt",
    "transformer/config.json", "transformer/diffusion_pytorch_model-00001-of-2.safetensors",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "text_encoder/model.safetensors", "text_encoder/pytorch_model.bin", "assets/x.json",
)  # fmt: skip
INDEX = {
    "_class_name": "ZImagePipeline",
    "scheduler": ["diffusers", "S"],
    "tokenizer": ["transformers", "T"],
    "text_encoder": ["transformers", "E"],
    "transformer": ["diffusers", "D"],
    "assets": [None, None],
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one repository of `FILES`; returns the list of what is downloaded."""
    taken = []

    def snapshot_download(repo_id, *, allow_patterns, ignore_patterns=None, **_):
        assert repo_id == "some/pipeline"
        wanted = huggingface_hub.utils.filter_repo_objects(
            FILES, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in wanted:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(INDEX) if name == "model_index.json" else "{}")
            taken.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return taken


def test_of_a_pipeline_only_what_its_components_need_is_downloaded(hub, tmp_path):
    assert source.resolve("some/pipeline") == tmp_path
    left = set(FILES) - set(hub)
    assert left == {
        "README.md", "whole.safetensors", "assets/x.json", "text_encoder/pytorch_model.bin",
        "transformer/diffusion_pytorch_model.fp16.safetensors",
    }  # fmt: skip


def test_a_pipeline_that_is_not_served_is_refused_before_its_weights_come(hub):
    def refuse(index, directory):
        raise errors.ConfigError(f"{index['_class_name']} is not served")

    with pytest.raises(errors.ConfigError, match="^ZImagePipeline is not served$"):
        source.resolve("some/pipeline", check_index=refuse)
    assert set(hub) == {"model_index.json", "config.json"}


def test_an_engine_for_text_refuses_a_pipeline_before_its_weights_come(hub):
    with pytest.raises(errors.ConfigError, match="is an image pipeline; use jdllm.ImageEngine"):
        engine.Engine(model_path="some/pipeline")
    assert set(hub) == {"model_index.json", "config.json"}


def test_a_server_refuses_an_option_of_text_before_the_weights_of_a_pipeline_come(hub):
    options = cli.parse(["--model-path", "some/pipeline", "--page-size", "16"])
    with pytest.raises(errors.ConfigError, match="page_size=16 has no meaning for this model"):
        serve.build_engine(options, startup.StartupProgress())
    assert set(hub) == {"model_index.json", "config.json"}
