"""Sizes, work and refusals of a FLUX.1 transformer; the full size is that of the release."""

from __future__ import annotations

import json
import math
import pathlib

import jax.numpy as jnp
import pytest

from jdllm import errors
from jdllm.models.images import flux, flux_config

FULL_SIZE = pathlib.Path(__file__).parents[3] / "configs" / "flux-1-dev"
PARAMETERS = 11_901_408_320
TERA = 10**12


def full_size():
    return flux_config.read(json.loads((FULL_SIZE / "transformer/config.json").read_text()))


def test_the_full_size_has_the_parameters_of_the_release():
    arrays = flux.COMPONENT.abstract(full_size(), jnp.dtype(jnp.bfloat16))[1]
    assert sum(math.prod(array.shape) for array in arrays.values()) == PARAMETERS
    rows = flux.COMPONENT.weight_rows(full_size())
    assert sum(math.prod(row.shape) for row in rows) == PARAMETERS
    assert len({row.name for row in rows}) == len(rows)
    # Indices of 32 bits reach every element.
    assert max(math.prod(array.shape) for array in arrays.values()) < 2**31


@pytest.mark.parametrize(
    ("resolution", "tera", "attention_tera"), [(512, 21.5, 1.7), (1024, 74.4, 14.9)]
)
def test_work_of_a_forward(resolution, tera, attention_tera):
    config, tokens = full_size(), (resolution // 16) ** 2
    total = flux_config.flops(config, tokens, 512)
    assert round(total / TERA, 1) == tera
    linear = 2 * 12 * 3072**2 * 57 * (tokens + 512)
    assert round((total - linear) / TERA, 1) == attention_tera


def test_missing_keys_have_the_defaults_of_the_class():
    assert flux_config.read({"guidance_embeds": True, "out_channels": 64}) == full_size()
    assert not flux_config.read({"axes_dims_rope": None}).guidance_embeds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 2}, "patch_size=2 is not supported"),
        ({"out_channels": 16}, "out_channels=16 is not supported; supported: 64"),
        ({"in_channels": 384, "out_channels": 64}, "out_channels=64 is not supported"),
        ({"in_channels": 66}, "in_channels=66 must be a multiple of 4"),
        ({"axes_dims_rope": [16, 56, 64]}, "must add up to attention_head_dim=128"),
        ({"axes_dims_rope": [17, 55, 56]}, "must be even"),
        ({"axes_dims_rope": [64, 64]}, "axes_dims_rope=.* three positive integers"),
        ({"num_layer": 19}, "unknown key num_layer=19; did you mean 'num_layers'"),
        ({"quantization_config": {"bits": 4}}, "unknown key quantization_config"),
        ({"guidance_embeds": 1}, "guidance_embeds=1 must be true or false"),
        ({"num_layers": 0}, "num_layers=0"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, message):
    with pytest.raises(errors.ConfigError, match=f"config.json: .*{message}"):
        flux_config.read(change)
