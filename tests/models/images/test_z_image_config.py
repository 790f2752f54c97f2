"""Sizes, work and refusals of a Z-Image transformer; the full size is that of the release."""

from __future__ import annotations

import json
import math
import pathlib

import jax.numpy as jnp
import pytest

from jdllm import errors
from jdllm.models.images import z_image, z_image_config
from jdllm.pipelines import flow_schedule

FULL_SIZE = pathlib.Path(__file__).parents[3] / "configs" / "z-image-turbo"
PARAMETERS = 6_154_908_736
TERA = 10**12


def full_size():
    return z_image_config.read(json.loads((FULL_SIZE / "transformer/config.json").read_text()))


def test_the_full_size_has_the_parameters_of_the_release():
    graphdef, arrays = z_image.COMPONENT.abstract(full_size(), jnp.dtype(jnp.bfloat16))
    assert sum(math.prod(array.shape) for array in arrays.values()) == PARAMETERS
    rows = z_image.COMPONENT.weight_rows(full_size())
    assert sum(math.prod(row.shape) for row in rows) == PARAMETERS
    assert {array.dtype.name for array in arrays.values()} == {"bfloat16"}


def test_names_of_the_index_are_those_of_the_components():
    index = json.loads((FULL_SIZE / "model_index.json").read_text())
    assert index["transformer"][1] in z_image.COMPONENT.class_names
    scheduler = json.loads((FULL_SIZE / "scheduler/scheduler_config.json").read_text())
    assert index["scheduler"][1] == flow_schedule.CLASS_NAME == scheduler["_class_name"]
    assert flow_schedule.read(scheduler) == flow_schedule.FlowSchedule(shift=3.0)
    for name in ("text_encoder", "transformer", "vae"):
        config = json.loads((FULL_SIZE / name / "config.json").read_text())
        assert config.get("_class_name", index[name][1]) == index[name][1]


@pytest.mark.parametrize(
    ("resolution", "tera", "attention_tera"), [(512, 12.9, 0.6), (1024, 55.6, 8.5)]
)
def test_work_of_a_forward(resolution, tera, attention_tera):
    config, tokens = full_size(), (resolution // 16) ** 2
    total = z_image_config.flops(config, tokens, 64)
    assert round(total / TERA, 1) == tera
    # By hand: 4 D² weights of attention and 3 D F of the feed-forward, 2 for a multiply-add.
    weights = 4 * 3840**2 + 3 * 3840 * 10240
    linear = 2 * weights * (30 * (tokens + 64) + 2 * tokens + 2 * 64)
    assert round((total - linear) / TERA, 1) == attention_tera


def test_the_padding_of_the_model_is_work():
    config = full_size()
    assert z_image_config.flops(config, 1000, 33) == z_image_config.flops(config, 1024, 64)


def test_missing_keys_have_the_defaults_of_the_class():
    changed = {"axes_lens": [1536, 512, 512]}
    assert z_image_config.read(changed) == full_size()
    assert z_image_config.read({"axes_lens": None}).axes_lens == (1024, 512, 512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"siglip_feat_dim": 1152}, "siglip_feat_dim=1152 is not supported"),
        ({"all_patch_size": [2, 4]}, r"all_patch_size=\[2, 4\] is not supported"),
        ({"all_f_patch_size": [2]}, "all_f_patch_size"),
        ({"qk_norm": False}, "qk_norm=False is not supported"),
        ({"quantization_config": {"bits": 4}}, "unknown key quantization_config"),
        ({"n_layer": 30}, "unknown key n_layer=30; did you mean 'n_layers'"),
        ({"n_heads": 29}, "dim=3840 must be n_heads=29"),
        ({"axes_dims": [33, 47, 48]}, "must be even"),
        ({"axes_dims": [64, 64]}, "axes_dims=.* three positive integers"),
        ({"axes_lens": [1024, 512, 0]}, "axes_lens=.* three positive integers"),
        ({"dim": 3840.0}, "dim=3840.0 must be an integer"),
        ({"norm_eps": 0}, "norm_eps=0 must be"),
        ({"t_scale": "1000"}, "t_scale='1000' must be"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, message):
    with pytest.raises(errors.ConfigError, match=f"config.json: .*{message}"):
        z_image_config.read(change)
