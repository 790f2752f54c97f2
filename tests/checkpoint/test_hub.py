"""Which files of a repository are downloaded, and what is said of those that are not read."""

from __future__ import annotations

import json

import huggingface_hub
import pytest

from jdllm import errors
from jdllm.checkpoint import source

INDEX = {
    "_class_name": "ZImagePipeline",
    "scheduler": ["diffusers", "S"],
    "tokenizer": ["transformers", "T"],
    "text_encoder": ["transformers", "E"],
    "transformer": ["diffusers", "D"],
    "vae": ["diffusers", "A"],
}
SMALL = {
    "model_index.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer.json",
    "text_encoder/config.json", "transformer/config.json", "vae/config.json",
}  # fmt: skip
TRANSFORMER, VAE = "transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model"
PLAIN = {
    "text_encoder/model-00001-of-00002.safetensors",
    "text_encoder/model-00002-of-00002.safetensors",
    f"{TRANSFORMER}.safetensors",
    f"{VAE}.safetensors",
}
HALF = {
    "text_encoder/model.fp16-00001-of-00002.safetensors",
    "text_encoder/model.fp16-00002-of-00002.safetensors",
    f"{TRANSFORMER}.fp16.safetensors",
}
INDEXES = {
    "text_encoder/model.safetensors.index.json",
    "text_encoder/model.safetensors.index.fp16.json",
}
OTHERS = {
    "README.md", "whole.safetensors", f"{TRANSFORMER}.bin", f"{TRANSFORMER}.fp8.safetensors",
    f"{TRANSFORMER}-00001-of-00002.bf16.safetensors",
}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Makes a hub with one repository of the given files; returns what is downloaded."""
    taken = set()

    def make(*files, is_listed=True, config=None):
        files = set().union(*files)

        def snapshot_download(repo_id, *, allow_patterns, ignore_patterns=None, **_):
            assert repo_id == "some/model"
            for name in huggingface_hub.utils.filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            ):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                content = INDEX if name == "model_index.json" else config or {}
                (tmp_path / name).write_text(json.dumps(content))
                taken.add(name)
            return str(tmp_path)

        def list_repo_files(repo_id, *, revision):
            assert (repo_id, revision) == ("some/model", None)
            if not is_listed:
                raise RuntimeError("no network")
            return sorted(files)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", list_repo_files)
        return taken

    return make


def refusal(**options):
    with pytest.raises(errors.ConfigError) as error:
        source.resolve("some/model", **options)
    return str(error.value)


def test_no_variant_comes_unless_it_is_asked_for(hub):
    taken = hub(SMALL, PLAIN, HALF, INDEXES, OTHERS)
    source.resolve("some/model")
    assert taken == SMALL | PLAIN | INDEXES


def test_of_a_component_with_the_variant_nothing_else_comes(hub):
    taken = hub(SMALL, PLAIN, HALF, INDEXES, OTHERS)
    source.resolve("some/model", variant="fp16")
    assert taken == SMALL | HALF | INDEXES | {f"{VAE}.safetensors"}


def test_older_shards_of_a_variant_come(hub):
    older = {f"{TRANSFORMER}-0000{i}-of-00002.fp16.safetensors" for i in (1, 2)}
    index = {f"{TRANSFORMER}.safetensors.fp16.index.json"}
    taken = hub(SMALL, PLAIN, older, index)
    source.resolve("some/model", variant="fp16")
    assert taken == SMALL | older | index | {name for name in PLAIN if TRANSFORMER not in name}


@pytest.mark.parametrize("variant", ["bf16", "*", "fp16/../x"])
def test_a_variant_that_is_not_there_is_refused_before_any_weights_come(hub, variant):
    taken = hub(SMALL, PLAIN, HALF)
    text = refusal(variant=variant)
    assert f"some/model: variant={variant!r}: no component has weights of this variant" in text
    assert "there are fp16 (text_encoder, transformer)" in text
    assert taken == SMALL


def test_a_variant_alone_must_be_asked_for(hub):
    taken = hub(SMALL, PLAIN - {f"{TRANSFORMER}.safetensors"}, HALF)
    text = refusal()
    assert "transformer has no weights that are read" in text
    assert "weights of a variant, fp16: add --variant fp16" in text
    source.resolve("some/model", variant="fp16")
    assert taken >= HALF


def test_other_formats_of_weights_are_named(hub):
    hub(SMALL, {f"{TRANSFORMER}.bin", "vae/ae.gguf", "text_encoder/model.safetensors"})
    text = refusal()
    assert "transformer has no weights that are read; found diffusion_pytorch_model.bin: " in text
    assert "vae has no weights that are read; found ae.gguf: quantised" in text
    assert "text_encoder has" not in text


def test_a_pipeline_that_the_hub_has_in_part_is_given_as_it_is_without_a_list(hub):
    taken = hub(SMALL, {f"{TRANSFORMER}.bin"}, is_listed=False)
    source.resolve("some/model")  # what reads the folder says what is missing
    assert taken == SMALL


def test_a_repository_of_one_component_is_refused_before_its_weights_come(hub):
    taken = hub(
        {"config.json", "diffusion_pytorch_model.safetensors"},
        config={"_class_name": "AutoencoderKL"},
    )
    text = refusal()
    assert "one component of an image pipeline ('AutoencoderKL')" in text
    assert taken == {"config.json"}


def test_a_repository_of_single_files_is_refused_before_they_come(hub):
    taken = hub({"README.md", "flux1-dev.safetensors", "flux1-dev-Q4.gguf"})
    text = refusal()
    assert "holds no config.json and no model_index.json" in text
    assert "found flux1-dev-Q4.gguf: quantised" in text and "found flux1-dev.safetensors: " in text
    assert taken == set()
