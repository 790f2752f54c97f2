"""Weights that do not fit are refused before they are read, with what would fit."""

import pathlib
import re

import jax.numpy as jnp
import pytest

from jdllm import errors
from jdllm.device import sharding
from jdllm.engine.start import weights_fit
from jdllm.models import loading, split

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
BF16 = jnp.dtype(jnp.bfloat16)
H100 = 60_000_000_000  # what JAX has of 80 GB


@pytest.fixture(scope="module")
def flash():
    return loading.read_config(CONFIGS / "llada2.0-flash")


def test_a_rank_has_half_of_what_is_split_and_all_of_the_rest(flash):
    D, layers, experts, width = 4096, 32, 256, 1024
    embedding = 157184 * D * 2
    routers = (layers - 1) * (D + 1) * experts * 4  # float32
    norms = ((2 * layers + 1) * D + 2 * layers * 128) * 2
    attention = layers * D * (32 + 2 * 4 + 32) * 128 * 2
    dense = 3 * D * 9216 * 2
    moe = (layers - 1) * (experts + 1) * 3 * D * width * 2
    split_bytes, rest = embedding + attention + dense + moe, embedding + routers + norms
    whole = weights_fit.bytes_of_rank(flash, sharding.ONE_RANK, BF16)
    assert whole == split_bytes + rest
    for tp in (2, 4):
        part = weights_fit.bytes_of_rank(flash, split.shards_of(flash, tp, None), BF16)
        assert part == split_bytes // tp + rest


def test_sizes_that_fit_are_named(flash):
    with pytest.raises(errors.ConfigError) as error:
        weights_fit.check(flash, sharding.ONE_RANK, BF16, H100)
    message = str(error.value)
    assert re.search(r"tp_size=1: the weights need 20\d\.\d GB of each device", message)
    assert re.search(r"use tp_size 4 \(5\d\.\d GB each\), 8 \(2\d\.\d GB each\)$", message)


def test_a_model_too_large_for_all_sizes_says_so(flash):
    with pytest.raises(errors.ConfigError, match="no tp_size of this host's would fit"):
        weights_fit.check(flash, sharding.ONE_RANK, BF16, 10_000_000_000)


@pytest.mark.parametrize("limit", [None, 300_000_000_000])
def test_what_fits_or_cannot_be_told_passes(flash, limit):
    weights_fit.check(flash, sharding.ONE_RANK, BF16, limit)
