"""Weights in the forms in which others write them: each loads as the published form does."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support import golden_flux

from jdllm import errors
from jdllm.pipelines import folder as pipeline_folder

TEXT = {"text_encoder": "float32", "text_encoder_2": "float32", "vae": "float32"}
FILES = {
    "text_encoder": "model.safetensors",
    "text_encoder_2": "model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
}
WORDS, SECOND_WORDS = "shared.weight", "encoder.embed_tokens.weight"
OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
CLIP_IDS = np.arange(77)
VISION = {
    "vision_model.embeddings.position_ids": CLIP_IDS[None],
    "vision_model.post_layernorm.weight": np.ones(3, np.float32),
    "visual_projection.weight": np.ones((3, 3), np.float32),
    "text_projection.weight": np.ones((3, 3), np.float32),
    "logit_scale": np.array(2.6, np.float32),
}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(golden_flux.folder(), tmp_path / "pipeline")


def rewrite(folder, component, change):
    path = folder / component / FILES[component]
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(change(tensors), path)


def reconfigure(folder, component, change):
    path = folder / component / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def loaded(folder, dtypes=TEXT):
    found = pipeline_folder.read(folder).load(dtypes, show_progress=False)
    return {name: one.params for name, one in found.items()}


def assert_like_the_published(folder):
    reference = loaded(golden_flux.folder())
    for name, params in loaded(folder).items():
        assert params.keys() == reference[name].keys()
        for path, array in params.items():
            np.testing.assert_array_equal(array, reference[name][path], err_msg=path)


def renamed(tensors, names):
    return {names.get(name, name): array for name, array in tensors.items()}


def old_attention(tensors, *, is_convolution):
    found = {}
    for name, array in tensors.items():
        if ".attentions." in name:
            for new, old in OLD_NAMES.items():
                name = name.replace(f".{new}.", f".{old}.")
            if is_convolution and array.ndim == 2:
                array = array[:, :, None, None]
        found[name] = array
    return found


FORMS = {
    "words of T5's encoder alone": (
        "text_encoder_2",
        lambda tensors: renamed(tensors, {WORDS: SECOND_WORDS}),
    ),
    "words twice": (
        "text_encoder_2",
        lambda tensors: tensors | {SECOND_WORDS: np.zeros((2, 2), np.int8)},
    ),
    "a whole T5": (
        "text_encoder_2",
        lambda tensors: tensors | {"decoder.x": CLIP_IDS, "lm_head.weight": CLIP_IDS},
    ),
    "position_ids": (
        "text_encoder",
        lambda tensors: tensors | {"text_model.embeddings.position_ids": CLIP_IDS[None]},
    ),
    "a whole CLIP": ("text_encoder", lambda tensors: tensors | VISION),
    "float64": (
        "text_encoder",
        lambda tensors: {name: array.astype(np.float64) for name, array in tensors.items()},
    ),
    "older names of attention": (
        "vae",
        lambda tensors: old_attention(tensors, is_convolution=False),
    ),
    "attention as convolutions": (
        "vae",
        lambda tensors: old_attention(tensors, is_convolution=True),
    ),
    "dtypes that nobody asks for": (
        "vae",
        lambda tensors: (
            tensors
            | {
                "encoder.a": np.zeros(3, bool),
                "encoder.b": np.zeros((2, 2), ml_dtypes.float8_e4m3fn),
                "encoder.c": np.zeros(5, np.uint16),
            }
        ),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_another_form_of_the_weights_is_read(folder, form):
    component, change = FORMS[form]
    rewrite(folder, component, change)
    assert_like_the_published(folder)


CONFIGS = {
    "CLIP with a projection": (
        "text_encoder",
        lambda config: config | {"architectures": ["CLIPTextModelWithProjection"]},
    ),
    "a whole CLIP": (
        "text_encoder",
        lambda config: {
            "architectures": ["CLIPModel"],
            "model_type": "clip",
            "projection_dim": 16,
            "text_config": config,
            "vision_config": {"hidden_size": 3},
        },
    ),
    "a whole T5": (
        "text_encoder_2",
        lambda config: config | {"architectures": ["T5ForConditionalGeneration"]},
    ),
}


@pytest.mark.parametrize("form", CONFIGS)
def test_the_config_of_a_larger_model_is_read(folder, form):
    component, change = CONFIGS[form]
    reconfigure(folder, component, change)
    assert_like_the_published(folder)


def test_a_whole_clip_has_a_config_of_its_text(folder):
    reconfigure(folder, "text_encoder", lambda config: {"model_type": "clip", "text_config": 3})
    with pytest.raises(errors.ConfigError, match="text_encoder: config.json: text_config=3 must"):
        pipeline_folder.read(folder)


def test_the_dtype_of_a_component_is_that_of_the_weights_that_are_read(folder):
    def change(tensors):
        half = {name: array.astype(np.float16) for name, array in tensors.items()}
        return half | {"encoder.large": np.zeros((1000, 1000), np.int32)}

    rewrite(folder, "vae", change)
    rewrite(folder, "text_encoder", FORMS["float64"][1])
    models = pipeline_folder.read(folder).models
    assert models["vae"].stored_dtype == "float16"
    assert models["text_encoder"].stored_dtype == "float32"
    params = models["text_encoder"].load(show_progress=False).params
    assert {array.dtype for array in params.values()} == {jnp.dtype("float32")}


def test_weights_of_a_dtype_that_is_not_read_are_named_before_any_is_read(folder):
    def change(tensors):
        tensors["decoder.conv_in.weight"] = tensors["decoder.conv_in.weight"].astype(np.int8)
        tensors["decoder.conv_out.bias"] = np.zeros(3, ml_dtypes.float8_e4m3fn)
        return tensors

    rewrite(folder, "vae", change)
    with pytest.raises(errors.ConfigError) as error:
        pipeline_folder.read(folder)
    for part in (
        "vae: checkpoint does not fit the model",
        "2 tensors of a dtype that is not read, such as those of quantised weights",
        "decoder.conv_in.weight is I8",
        "decoder.conv_out.bias is F8_E4M3",
    ):
        assert part in str(error.value)


def test_attention_under_both_names_is_refused(folder):
    rewrite(folder, "vae", lambda tensors: tensors | old_attention(tensors, is_convolution=False))
    with pytest.raises(errors.ConfigError, match="8 tensors unexpected:\n.*key.bias"):
        pipeline_folder.read(folder)
