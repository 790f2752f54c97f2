"""Variants of weights, and what lies in a folder in place of the weights that are read."""

from __future__ import annotations

import json
import logging
import shutil
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from support import golden_images, image_engine

import jdllm
from jdllm import convert, errors
from jdllm.checkpoint import source
from jdllm.engine.start.images import options as image_options
from jdllm.options.config import EngineConfig
from jdllm.pipelines import folder as pipeline_folder

GOLDEN = golden_images.PIPELINE
DIFFUSERS = "diffusion_pytorch_model"
BASES = {"text_encoder": "model", "transformer": DIFFUSERS, "vae": DIFFUSERS}
WHOLE = ("{}.fp16.safetensors", None)
FORMS = {
    "whole": WHOLE,
    "shards": ("{}.fp16-0000{{}}-of-00002.safetensors", "{}.safetensors.index.fp16.json"),
    "shards without an index": ("{}.fp16-0000{{}}-of-00002.safetensors", None),
    "older shards": ("{}-0000{{}}-of-00002.fp16.safetensors", "{}.safetensors.fp16.index.json"),
}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN, tmp_path / "pipeline")


def weights(folder, component):
    return folder / component / f"{BASES[component]}.safetensors"


def write_variant(folder, component, form=WHOLE):
    """Moves the weights of a component into a variant, and leaves others in their place."""
    names, index = form[0].format(BASES[component]), form[1]
    tensors = safetensors.numpy.load_file(weights(folder, component))
    weight_map = {}
    for i in range(2):
        part = [name for j, name in enumerate(tensors) if "{" not in names or j % 2 == i]
        weight_map |= dict.fromkeys(part, names.format(i + 1))
        safetensors.numpy.save_file(
            {name: tensors[name] for name in part}, folder / component / names.format(i + 1)
        )
    if index is not None:
        path = folder / component / index.format(BASES[component])
        path.write_text(json.dumps({"weight_map": weight_map}))
    others = {name: array + np.float32(1) for name, array in tensors.items()}
    safetensors.numpy.save_file(others, weights(folder, component))


def loaded(folder, **options):
    dtypes = dict.fromkeys(BASES, "float32")
    return pipeline_folder.read(folder, **options).load(dtypes, show_progress=False)


def equal(folder, **options):
    """Returns the components whose weights are those of the golden."""
    reference = loaded(GOLDEN)
    return {
        name
        for name, one in loaded(folder, **options).items()
        if all(np.array_equal(one.params[path], a) for path, a in reference[name].params.items())
    }


def refusal(call, *arguments, **options):
    with pytest.raises(errors.ConfigError) as error:
        call(*arguments, **options)
    return str(error.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_variant_is_read_if_it_is_asked_for(folder, form):
    for name in BASES:
        write_variant(folder, name, FORMS[form])
    assert equal(folder, variant="fp16") == set(BASES)
    assert equal(folder) == set()


def test_components_without_the_variant_are_read_without_and_the_log_says_so(folder, caplog):
    write_variant(folder, "transformer")
    with caplog.at_level(logging.WARNING):
        assert equal(folder, variant="fp16") == set(BASES)
    assert "no variant fp16 of text_encoder and vae: the weights without" in caplog.text


def test_a_variant_that_no_component_has_is_refused_with_those_that_there_are(folder):
    assert "there is none; leave it out" in refusal(pipeline_folder.read, folder, variant="bf16")
    write_variant(folder, "transformer")
    write_variant(folder, "vae")
    text = refusal(pipeline_folder.read, folder, variant="bf16")
    assert "variant='bf16': no component has weights of this variant" in text
    assert "there are fp16 (transformer, vae)" in text
    text = refusal(pipeline_folder.read, folder, variant="fp16", load_format="dummy")
    assert "variant='fp16' names weights, and load_format='dummy' reads none" in text


@pytest.mark.parametrize("form", FORMS)
def test_a_variant_alone_must_be_asked_for(folder, form):
    write_variant(folder, "vae", FORMS[form])
    weights(folder, "vae").unlink()
    text = refusal(pipeline_folder.read, folder)
    assert "vae: " in text and "weights of a variant, fp16: add --variant fp16" in text
    assert "variant='fp16'" in text
    assert equal(folder, variant="fp16") == set(BASES)


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["diffusion_pytorch_model.bin"], ["only safetensors are read", "save_pretrained"]),
        (["a.pth", "b.pth", "c.pth", "d.pth"], ["found a.pth, b.pth, c.pth, 1 more: only"]),
        (["z-image-Q4_K.gguf"], ["quantised weights are not read"]),
        (["ae.safetensors"], ["ae.safetensors: weights of another name", "from_single_file"]),
    ],
    ids=lambda value: value[0],
)
def test_what_lies_in_place_of_weights_is_named_with_what_to_do(folder, names, parts):
    weights(folder, "vae").unlink()
    for name in names:
        (folder / "vae" / name).write_bytes(b"any")
    text = refusal(pipeline_folder.read, folder)
    assert f"vae holds no {DIFFUSERS}.safetensors or" in text
    for part in [names[0], *parts]:
        assert part in text


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf", "torchao", "fp8"])
@pytest.mark.parametrize("component", BASES)
def test_weights_that_are_quantised_already_are_refused(folder, component, method):
    path = folder / component / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
    path.write_text(json.dumps(config))
    text = refusal(pipeline_folder.read, folder)
    assert f"{component}: config.json: quantization_config={{'quant_method': '{method}'}}" in text
    assert "use the checkpoint in 16 or 32 bits, with --quantization fp8" in text


def test_a_path_into_a_pipeline_is_refused_with_the_folder_to_give(folder, tmp_path):
    for path in (weights(folder, "vae"), folder / "model_index.json"):
        assert refusal(source.resolve, path).endswith(
            f"{path} is a file, and a model is a folder; give the folder {folder}"
        )
    for name in ("transformer", "text_encoder", "tokenizer", "scheduler"):
        text = f"{folder / name} is one component of the image pipeline {folder}; give that folder"
        assert refusal(source.resolve, folder / name) == text
    alone = shutil.copytree(folder / "transformer", tmp_path / "alone")
    text = refusal(source.resolve, alone)
    assert "one component of an image pipeline ('ZImageTransformer2DModel')" in text
    assert "model_index.json" in text


@pytest.mark.parametrize("name", ["flux1-dev.safetensors", "flux1-dev.gguf", "model.ckpt"])
def test_a_model_in_one_file_is_refused_with_what_to_do(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"any")
    as_file, as_folder = refusal(source.resolve, path), refusal(source.resolve, tmp_path)
    assert f"{path} is a file, and a model is a folder; found {name}: " in as_file
    assert "holds no config.json and no model_index.json" in as_folder
    assert as_file.partition("; found ")[2] == as_folder.partition("; found ")[2] != ""


def test_the_option_of_an_engine_reaches_its_build(folder):
    config = EngineConfig(model_path=str(folder), variant="fp16")
    assert image_options.build_config(config).variant == "fp16"


@pytest.mark.campaign  # an engine of its own, whose programs take long to compile
def test_an_engine_makes_the_same_images_from_a_variant(folder):
    for name in BASES:
        write_variant(folder, name)
    asked = {"height": 96, "width": 96, "num_inference_steps": 1, "seed": 3, "output_type": "np"}
    expected = image_engine.shared().generate("a cat", use_tqdm=False, **asked)
    options: dict[str, Any] = {**image_engine.OPTIONS, "model_path": str(folder)}
    with jdllm.ImageEngine(**options, variant="fp16") as engine:
        found = engine.generate("a cat", use_tqdm=False, **asked)
        assert engine.server_info()["variant"] == "fp16"
    np.testing.assert_array_equal(found, expected)


def test_a_model_that_writes_text_has_no_variants(tmp_path):
    text = "variant='fp16' has no meaning for this model, which makes text"
    assert text in refusal(jdllm.Engine, variant="fp16")
    output = tmp_path / "converted"
    assert text in refusal(convert.convert, "jdllm-nano", output, variant="fp16")
    assert not output.exists()


def test_a_variant_is_converted(folder, tmp_path):
    for name in BASES:
        write_variant(folder, name, FORMS["shards"])
    output = tmp_path / "converted"
    command = ["--model-path", str(folder), "--output", str(output), "--variant", "fp16"]
    assert convert.main(command) == 0
    assert equal(output) == set(BASES)
    assert not list(output.rglob("*.index*"))
